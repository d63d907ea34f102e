"""Options of a run from a YAML file: one that a person wrote, or OUT/config.yaml."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import read_yaml
from wgrad.train.options.finetune_config import CONFIG_FORMAT, RunOptions
from wgrad.train.options.option_names import option_hint


def config_from_mapping(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Field names to values from a YAML mapping; `source` is named in the error for a key that is none."""
    names = [f.name for f in fields(RunOptions)]
    result: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in names:
            hint = option_hint(str(key), names, "") or ": see wgrad finetune --help"
            raise WgradError(f"{source}: unknown key {key!r}{hint}")
        if name in result:
            raise WgradError(f"{source}: {name!r} is given twice: remove one")
        result[name] = value
    return result


def read_config_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Field names to values from a YAML file. Raises WgradError: not there, not YAML, not a mapping, unknown key."""
    source = os.fspath(path)
    values = read_yaml(path, "--config")
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise WgradError(f"--config: {source}: expected lines like 'rank: 16', got a {type(values).__name__}")
    written = values.pop("format", CONFIG_FORMAT)
    if written != CONFIG_FORMAT:
        raise WgradError(
            f"--config: {source}: format must be {CONFIG_FORMAT}; got {written!r}: it is of another version of wgrad: "
            "write the options anew"
        )
    return config_from_mapping(values, f"--config: {source}")
