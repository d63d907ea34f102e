"""The options of a run from where they may be given: by name, in a YAML file, by the run that is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.files.input_files import exists, expand_path
from wgrad.train.options.config_yaml import read_config_file
from wgrad.train.options.finetune_config import AUTO, CONFIG_FILE, FinetuneConfig, RunOptions
from wgrad.train.options.options import fixed_options, flag
from wgrad.train.options.unused_options import unused_options


def resolve_config(given: dict[str, Any]) -> FinetuneConfig:
    """What `resolve_options` gives, as the configuration of a run. WgradError also without --model, --data or --out."""
    options = resolve_options(given)
    options.require("in a --config file")
    return FinetuneConfig(**options.to_dict())


def resolve_options(given: dict[str, Any]) -> RunOptions:
    """The options that were given by name (fields, and 'config') -> those of the run.

    What is given by name beats --config, which beats OUT/config.yaml (with --resume), which beats defaults. Raises
    WgradError: a value that breaks its rule; with --resume, a change that the checkpoint does not allow.
    """
    given = dict(given)
    for name in ("target_modules", "lr_sweep", "report_to"):
        if isinstance(given.get(name), list):  # "a,b" and "a b" and "a, b"
            given[name] = " ".join(map(str, given[name]))
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
