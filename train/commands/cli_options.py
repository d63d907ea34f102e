"""The options of a command line, made from a dataclass; how command line, YAML file and a resumed run combine."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from wgrad.device.errors import WgradError
from wgrad.train.files.input_files import exists, expand_path
from wgrad.train.options.finetune_config import (
    AUTO,
    CONFIG_FILE,
    FinetuneConfig,
    RunOptions,
    read_config_file,
)
from wgrad.train.options.option_names import option_hint
from wgrad.train.options.options import Options, field_type, fixed_options, flag, show
from wgrad.train.options.unused_options import unused_options


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
        hint = option_hint(word, (action.dest for action in self._actions), "--") if word.startswith("-") else ""
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
        if kind is bool:
            keywords["action"] = argparse.BooleanOptionalAction
        else:
            choices = "{" + ",".join(map(str, meta["choices"])) + "}" if meta["choices"] else ""
            keywords["metavar"] = choices if kind is str and choices else meta["metavar"]
            if meta["repeat"]:
                keywords["action"] = "append"
            elif kind is tuple:
                keywords["nargs"] = "+"
        group.add_argument(flag(field.name), **keywords)


def _help(field: dataclasses.Field) -> str:
    text, default = field.metadata["help"].replace("%", "%%"), field.default
    if default in (None, "", ()):
        return text
    return f"{text} (default: {'all seven' if isinstance(default, tuple) else show(default)})"


def resolve_config(given: dict[str, Any]) -> FinetuneConfig:
    """What `resolve_options` gives, as the configuration of a run. WgradError also without --model, --data or --out."""
    options = resolve_options(given)
    options.require("in a --config file")
    return FinetuneConfig(**options.to_dict())


def resolve_options(given: dict[str, Any]) -> RunOptions:
    """The options of the command line (fields that were given, and 'config') -> those of the run.

    Command line beats --config beats, with --resume, OUT/config.yaml, beats defaults. Raises WgradError: a value that
    breaks its rule; with --resume, a change that the checkpoint does not allow.
    """
    given = dict(given)
    if isinstance(given.get("target_modules"), list):  # "a,b" and "a b" and "a, b"
        given["target_modules"] = " ".join(given["target_modules"])
    path = given.pop("config", None)
    values = (read_config_file(expand_path(path, "--config")) if path else {}) | given
    saved = _saved(values)
    for name in (field.name for field in fixed_options(RunOptions)):
        if values.get(name) == AUTO and name in saved:  # what the device decided when the run was begun
            del values[name]
    if saved.get("vram") and _rows(RunOptions().to_dict() | values) == _rows(saved):
        for name in _CUT:  # how a step of so many rows is cut was chosen when the run was begun
            values.pop(name, None)
    config = RunOptions(**(saved | values))
    for name, reason in unused_options(config.to_dict()).items():
        if name in values:
            raise WgradError(f"{flag(name)}: would be ignored: {reason}: leave it out")
    if saved:
        before = RunOptions(**saved)
        for name in (field.name for field in fixed_options(RunOptions)):
            if getattr(config, name) != getattr(before, name):
                raise WgradError(
                    f"{flag(name)}: the run in {config.out} was begun with {getattr(before, name)!r}, which --resume "
                    f"cannot change to {getattr(config, name)!r}: leave the option out, or begin anew in another --out"
                )
    return config


_CUT = ("batch_size", "accumulate")


def _rows(values: Mapping[str, Any]) -> int | None:
    """Rows of a step, where these are numbers."""
    sizes = [str(values.get(name)) for name in _CUT]
    return int(sizes[0]) * int(sizes[1]) if all(map(str.isdecimal, sizes)) else None


def _saved(values: dict[str, Any]) -> dict[str, Any]:
    """Values of OUT/config.yaml where the run is to be resumed and has one."""
    if not (values.get("resume") and values.get("out")):
        return {}
    path = Path(expand_path(str(values["out"]), "--out"), CONFIG_FILE)
    return read_config_file(path) if exists(path, "--out") else {}
