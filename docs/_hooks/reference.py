"""Generate the reference pages that follow from the code: one page per command, and the list of operators.

mkdocs calls the functions whose names begin with `on_` (mkdocs.yml: hooks).
"""

from __future__ import annotations

import argparse
import inspect
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

import wgrad.autograd.bind  # noqa: F401  registers the operators
from wgrad.autograd.operators import OPERATORS
from wgrad.train.commands.cli import build_parser

_SOURCE = Path(__file__).parents[2] / "src" / "wgrad"
_copy = tempfile.TemporaryDirectory(prefix="wgrad-docs-")


@event_priority(100)  # before mkdocstrings reads its settings
def on_config(config: Any) -> Any:
    """Put one entry per command where the navigation says reference/cli.md, and show mkdocstrings the sources.

    mkdocstrings follows neither links nor packages without __init__.py, so it reads a copy that has none of either. It
    reads whatever is there, so the copy has only the modules that a page names.
    """
    for module in {Path("__init__.py"), *_documented(Path(config.docs_dir))}:
        copied = Path(_copy.name, "wgrad", module)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_SOURCE / module, copied)
    for folder in Path(_copy.name, "wgrad").rglob("*/"):
        (folder / "__init__.py").touch()
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [_copy.name]
    for section in config.nav:
        if "Reference" in section:
            pages = section["Reference"]
            at = pages.index("reference/cli.md")
            pages[at] = {"Command line": ["reference/cli.md", *(f"reference/cli/{name}.md" for name, _ in commands())]}
    return config


def _documented(docs: Path) -> set[Path]:
    """Return the modules whose members pages show: `::: wgrad.device.errors`, `::: wgrad.autograd.optim.AdamW`."""
    found = set()
    for page in docs.rglob("*.md"):
        for name in re.findall(r"^::: wgrad\.([\w.]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            parts = name.split(".")
            modules = [Path(*parts[:count]).with_suffix(".py") for count in range(len(parts), 0, -1)]
            found.update(module for module in modules if (_SOURCE / module).is_file())
    return found


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    pages = {"reference/cli.md": command_list(), "reference/operators.md": operators()}
    pages |= {f"reference/cli/{name}.md": command(name, parser) for name, parser in commands()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def commands() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The commands with their parsers, in the order of `wgrad --help`."""
    yield from _subparsers().choices.items()


def command_list() -> str:
    helps = {action.dest: action.help for action in _subparsers()._choices_actions}
    rows = [f"| [`wgrad {name}`](cli/{name}.md) | {_cell(helps[name])} |" for name, _ in commands()]
    head = (
        "Every option is also a key of a YAML file (`--config`) and an "
        "argument in Python: `--max-length` is `max_length`."
    )
    return "\n".join(["# Command line", "", head, "", "| command | meaning |", "| --- | --- |", *rows, ""])


def command(name: str, parser: argparse.ArgumentParser) -> str:
    """The page of one command: its options in their groups."""
    lines = [f"# wgrad {name}", "", str(parser.description)]
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if "--help" not in a.option_strings and a.help != argparse.SUPPRESS]
        if actions:
            title = str(group.title)
            lines += ["", f"## {title[0].upper()}{title[1:]}", "", "| option | meaning |", "| --- | --- |"]
            lines += [f"| {_spelling(action)} | {_cell(action.help)} |" for action in actions]
    return "\n".join([*lines, *(["", str(parser.epilog)] if parser.epilog else []), ""])


def operators() -> str:
    """The operators with their contracts, by module."""
    intro = (
        "Every operator is a method of a device with the same rules on each: `device.rms_norm(x, weight, eps)`. "
        "`wgrad.functional` has the differentiable ones as functions on Tensors."
    )
    lines = ["# Operators", "", intro]
    modules: dict[str, list[str]] = {}
    for name, found in OPERATORS.items():
        modules.setdefault(str(found.__module__).rpartition(".")[2], []).append(name)
    for module, names in sorted(modules.items()):
        lines += ["", f"## {module}"]
        for name in names:
            doc = inspect.cleandoc(OPERATORS[name].__doc__ or "")
            signature = str(OPERATORS[name].signature).replace("'", "")
            lines += ["", f"### {name}", "", "```python", f"{name}{signature}", "```", "", "```text", doc, "```"]
    return "\n".join([*lines, ""])


def _subparsers() -> Any:
    return next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))


def _spelling(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    value = f" {action.metavar}" if action.metavar and action.nargs != 0 else ""
    return f"`{', '.join(action.option_strings)}{value}`".replace("|", "\\|")


def _cell(text: Any) -> str:
    return str(text or "").replace("%%", "%").replace("|", "\\|").replace("<", "&lt;")
