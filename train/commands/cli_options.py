"""The options of a command line, made from a dataclass."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn

from wgrad.device.errors import WgradError
from wgrad.train.options.option_names import option_hint
from wgrad.train.options.options import Options, field_type, flag, show


class Parser(argparse.ArgumentParser):
    """Errors are one line that ends in what to do, status 2; options are not abbreviated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise WgradError(f"{message}: see {self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Help and version. argparse's own hides that nothing could be written."""
        if message and file is not None:
            file.write(message)

    def refuse_unknown(self, unknown: list[str]) -> None:
        """WgradError for arguments that no option takes, naming the option that was meant."""
        if not unknown:
            return
        word = unknown[0].split("=")[0]
        fields = [action.dest for action in self._actions]
        switches = {a.dest for a in self._actions if any(text.startswith("--no-") for text in a.option_strings)}
        hint = option_hint(word, fields, "--", switches) if word.startswith("-") else ""
        self.error(f"unknown argument {word}{hint}")


def add_options(parser: argparse.ArgumentParser, options: type[Options], only: Mapping[str, str] | None = None) -> None:
    """One option for each field. Those that are not given are absent from the namespace; texts are kept as they are,
    because the dataclass turns them into numbers (and says what is wrong with them).

    only: the fields that the command takes, each with its help where that is not the field's own, else "".
    """
    groups: dict[str, Any] = {"": parser}
    for field in dataclasses.fields(options):
        meta = field.metadata
        if only is not None and field.name not in only:
            continue
        group = groups.get(meta["group"])
        if group is None:
            group = groups[meta["group"]] = parser.add_argument_group(meta["group"])
        kind = field_type(options, field.name)
        keywords: dict[str, Any] = {
            "dest": field.name,
            "default": argparse.SUPPRESS,
            "help": (only or {}).get(field.name) or _help(field),
        }
        if kind is bool and meta["metavar"]:  # or a number
            keywords |= {"nargs": "?", "const": True, "metavar": meta["metavar"]}
        elif kind is bool:
            keywords["action"] = argparse.BooleanOptionalAction
        else:
            choices = "{" + ",".join(map(str, meta["choices"])) + "}" if meta["choices"] else ""
            keywords["metavar"] = choices if kind is str and choices else meta["metavar"]
            if meta["repeat"]:
                keywords["action"] = "append"
            elif kind is tuple:
                keywords |= {"nargs": "+", "action": "extend"}  # given twice, they add up
        group.add_argument(flag(field.name), **keywords)
        if keywords.get("const"):
            off: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
            group.add_argument(flag(f"no_{field.name}"), action="store_false", help="not, whatever a file says", **off)


def _help(field: dataclasses.Field) -> str:
    text, default = field.metadata["help"].replace("%", "%%"), field.default
    if default in (None, "", ()):
        return text
    return f"{text} (default: {'all seven' if isinstance(default, tuple) else show(default)})"
