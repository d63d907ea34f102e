"""Options of a run from a YAML file: a user's, or OUT/config.yaml."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import read_yaml
from wgrad.train.options.finetune_config import CONFIG_FORMAT, RunOptions
from wgrad.train.options.former_names import current_name
from wgrad.train.options.option_names import option_hint

# Removed options: what they did, and the value that had no effect.
_REMOVED = {
    "sync_every": ("steps by each rank alone (DiLoCo)", 1),
    "exchange_bits": ("gradients in 16 bits between hosts", 32),
}
_LISTED = 60  # unknown keys that an error names


def config_from_mapping(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return field names and values of a YAML mapping.

    Args:
        values: The mapping.
        source: Where it is from; errors begin with it.

    Raises:
        WgradError: Keys are unknown (all are listed, with suggestions), or given twice.
    """
    names = [f.name for f in fields(RunOptions)]
    result: dict[str, Any] = {}
    unknown: list[Any] = []
    for key, value in values.items():
        name = current_name(str(key).replace("-", "_"), names)
        if name in _REMOVED:
            _refuse_removed(name, value, source)
        elif name not in names:
            unknown += _leaves(key, value)
        elif name in result:
            raise WgradError(f"{source}: {name!r} is given twice: remove one")
        else:
            result[name] = value
    if unknown:
        near = len(unknown) == 1  # one is likely a typo; several are likely another tool's names
        hints = [_meant(path, names, near=near) for path in unknown]
        listed = ", ".join(repr(path) + hint for path, hint in zip(unknown[:_LISTED], hints))
        more = f" and {len(unknown) - _LISTED} more" if len(unknown) > _LISTED else ""
        help_ = "" if all(hints) else ": see wgrad finetune --help"
        raise WgradError(f"{source}: unknown key{'s' * (len(unknown) > 1)} {listed}{more}{help_}")
    return result


def _refuse_removed(name: str, value: Any, source: str) -> None:
    """Raise WgradError if a removed option would have had an effect."""
    what, without = _REMOVED[name]
    if value != without:
        raise WgradError(f"{source}: {name}: wgrad no longer has {what}; got {value!r}: remove the line")


def _leaves(key: Any, value: Any) -> list[Any]:
    """Return the key, or the dotted paths of the values in a mapping: some tools group their options."""
    if not isinstance(value, dict) or not value:
        return [key if len(str(key)) <= 80 else f"{str(key)[:80]}..."]
    return [f"{key}.{path}" for inner, below in value.items() for path in _leaves(inner, below)]


def _meant(path: Any, names: list[str], *, near: bool) -> str:
    """Return a suggestion for a key; for a dotted path, of the whole path, its last two parts, or its last part."""
    parts = str(path).split(".")
    tried = ("_".join(parts), "_".join(parts[-2:]), parts[-1])
    return next((hint for word in tried if (hint := option_hint(word, names, "", near=near))), "")


def read_config_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read field names and values from a YAML file. WgradError: it is missing, malformed, or has unknown keys."""
    source = os.fspath(path)
    values = read_yaml(path, "--config")
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise WgradError(f"--config: {source}: expected lines like 'lora_r: 16', got a {type(values).__name__}")
    written = values.pop("format", CONFIG_FORMAT)
    if written != CONFIG_FORMAT:
        raise WgradError(
            f"--config: {source}: format must be {CONFIG_FORMAT}; got {written!r}: it is of another version of wgrad: "
            "write the options anew"
        )
    return config_from_mapping(values, f"--config: {source}")
