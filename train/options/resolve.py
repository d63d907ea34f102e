"""Combine the options of a run from its sources: names, a YAML file, and the run that is resumed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.device.shown import short
from wgrad.device.whole_numbers import whole_number
from wgrad.train.files.input_files import exists, expand_path
from wgrad.train.options.choices import AUTO
from wgrad.train.options.config_yaml import read_config_file
from wgrad.train.options.finetune_config import CONFIG_FILE, FinetuneConfig, RunOptions
from wgrad.train.options.options import fixed_options, flag
from wgrad.train.options.unused_options import unused_options


def resolve_config(given: dict[str, Any]) -> FinetuneConfig:
    """Return the options of a run, which must name --model, --data and --out. WgradError: as `resolve_options`."""
    options = resolve_options(given)
    options.require("in a --config file")
    return FinetuneConfig(**options.to_dict())


def resolve_options(given: dict[str, Any]) -> RunOptions:
    """Return the options of a run.

    Options by name override --config, which overrides OUT/config.yaml (with --resume), which overrides defaults.

    Args:
        given: Options by name, and 'config'.

    Raises:
        WgradError: A value breaks its rule or has no effect, or the resumed run does not allow the change.
    """
    given = dict(given)
    for name in ("target_modules", "lr_sweep", "report_to"):
        if isinstance(given.get(name), list):  # "a,b" and "a b" and "a, b"
            given[name] = " ".join(one if isinstance(one, str) else short(one) for one in given[name])
    path = given.pop("config", None)
    of_file = read_config_file(expand_path(path, "--config")) if path else {}
    values = of_file | given
    saved = _saved(values)
    # Sources of the values that were not given by name.
    files = {name: f"--resume: {Path(str(values.get('out')), CONFIG_FILE)}" for name in saved.keys() - values.keys()}
    files |= {name: f"--config: {path}" for name in of_file.keys() - given.keys()}
    for name in (field.name for field in fixed_options(RunOptions)):
        if values.get(name) == AUTO and name in saved:  # the device decided it when the run was begun
            del values[name]
    if values.get("batch_size") == AUTO:
        values |= {"batch_size": 1, "auto_find_batch_size": True}
    chosen = saved.get("vram") or saved.get("auto_find_batch_size")
    if chosen and _rows(RunOptions().to_dict() | values) == _rows(saved):
        for name in _CUT:  # keep the division into micro-batches that was chosen when the run was begun
            values.pop(name, None)
    with _naming(files):
        config = RunOptions(**(saved | values))
    for name, reason in unused_options(config.to_dict()).items():
        if name in values:
            raise WgradError(f"{_source(name, files)}: would be ignored: {reason}: {_leave_out(name, files)}")
    if saved:
        with _naming(dict.fromkeys(saved, f"--resume: {Path(config.out, CONFIG_FILE)}")):
            before = RunOptions(**saved)
        for name in (field.name for field in fixed_options(RunOptions)):
            if getattr(config, name) != getattr(before, name):
                raise WgradError(
                    f"{_source(name, files)}: the run in {config.out} was begun with {getattr(before, name)!r}, which "
                    f"--resume cannot change to {getattr(config, name)!r}: {_leave_out(name, files)}, or begin anew in "
                    "another --out"
                )
    return config


def _source(name: str, files: Mapping[str, str]) -> str:
    """Return the name for messages: the option, or the file and key that the value came from."""
    return f"{files[name]}: {name}" if name in files else flag(name)


def _leave_out(name: str, files: Mapping[str, str]) -> str:
    return "remove it there" if name in files else "leave it out"


@contextmanager
def naming_sources(given: Mapping[str, Any]) -> Iterator[None]:
    """Let errors in the block name the file and key of an option that came from --config.

    given: as for `resolve_options`.
    """
    path = given.get("config")
    of_file = read_config_file(expand_path(path, "--config")) if path else {}
    with _naming({name: f"--config: {path}" for name in of_file.keys() - given.keys()}):
        yield


@contextmanager
def _naming(files: Mapping[str, str]) -> Iterator[None]:
    """Let errors in the block name the file that an option's value came from. files: that file, by field name."""
    try:
        yield
    except WgradError as error:
        option, rest = _OPTION.match(str(error)), _OPTION.sub("", str(error), count=1)
        name = option[1].replace("-", "_") if option else ""
        if name not in files:
            raise
        error.args = (f"{_source(name, files)}{rest}",)  # re-raised as it is, to keep its class and traceback
        raise


_OPTION = re.compile(r"--([a-z0-9-]+)(?=:)")

_CUT = ("batch_size", "gradient_accumulation_steps")


def _rows(values: Mapping[str, Any]) -> int | None:
    """Return the sequences of a step; None: they are not given as numbers."""
    rows, accumulated = (whole_number(str(values.get(name))) for name in _CUT)
    return None if rows is None or accumulated is None else rows * accumulated


def _saved(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of OUT/config.yaml if the run is resumed and has one, else {}."""
    if not (values.get("resume") and values.get("out")):
        return {}
    path = Path(expand_path(str(values["out"]), "--out"), CONFIG_FILE)
    return read_config_file(path) if exists(path, "--out") else {}
