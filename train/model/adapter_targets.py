"""Modules that an adapter targets, by the rules of PEFT (`check_target_module_exists`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import show
from wgrad.train.model.lora import ALL_LINEAR, LoraConfig, ends_with, match_targets
from wgrad.train.model.patterns import NO_PATTERN, check_patterns

MERGE = "merge it with PEFT (merge_and_unload) and give the result with --model"
_WHOLE = r"(?:PATTERN)\Z"
_ANY_LAYERS, _LAYERS = r".*?\.[^.]*\.(\d+)\.", r"(?:^|.*?\.)PATTERN\.(\d+)\."

Layer = Annotated[int, Meta(ge=0, le=1 << 20)]


class LimitsFile(Struct):
    """Keys of adapter_config.json that exclude modules of target_modules."""

    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[Layer] | Layer | None = None
    layers_pattern: list[str] | str | None = None


def resolve_targets(
    lora: LoraConfig, limits: LimitsFile, modules: Sequence[str], others: Sequence[str], path: Path
) -> LoraConfig:
    """Return the configuration with the targets that the model has.

    Args:
        lora: Configuration of the adapter.
        limits: Keys that exclude modules.
        modules: Paths of the projections by the file's names.
        others: Paths of the embedding and the head.
        path: The adapter's configuration file, for errors.

    Raises:
        WgradError: No target is in the model, or the adapter adapts one of `others`.
    """
    source = f"--adapter: {path}"
    _check_limits(lora, limits, [*modules, *others], source)
    for module in others if lora.target_modules != ALL_LINEAR else ():  # which excludes them
        if _is_adapted(module, lora, limits):
            raise WgradError(
                f"{source}: target_modules has {show(module.rpartition('.')[2])}: LoRA on the embedding or the head is "
                f"not read here: {MERGE}"
            )
    if not isinstance(lora.target_modules, str):
        there = tuple(t for t in lora.target_modules if any(ends_with(module, t) for module in modules))
        lora = replace(lora, target_modules=there or lora.target_modules)
    found = match_targets(lora.target_modules, modules, f"{source}: target_modules")
    kept = [module for module in found if _is_adapted(module, lora, limits)]
    if kept == found:
        return lora
    if not kept:
        raise WgradError(
            f"{source}: exclude_modules and layers_to_transform leave no projection of this model: give the model that "
            "the adapter was made for"
        )
    return replace(lora, target_modules=tuple(kept))


def _check_limits(lora: LoraConfig, limits: LimitsFile, modules: Sequence[str], source: str) -> None:
    """Raise WgradError for an invalid or slow regular expression, and for layers beside an expression of targets."""
    forms = [(_LAYERS, pattern) for pattern in _listed(limits.layers_pattern)]
    if isinstance(limits.exclude_modules, str) and limits.exclude_modules:
        forms.append((_WHOLE, limits.exclude_modules))
    for form, pattern in forms:
        try:
            re.compile(form.replace("PATTERN", pattern))
        except NO_PATTERN as error:
            key = "layers_pattern" if form == _LAYERS else "exclude_modules"
            raise WgradError(f"{source}: {key}: {show(pattern)} is no regular expression: {error}") from error
    check_patterns(forms, modules, source)
    if isinstance(lora.target_modules, str) and lora.target_modules != ALL_LINEAR and _has_layers(limits):
        raise WgradError(
            f"{source}: layers_to_transform goes with a list of target_modules, which is the expression "
            f"{show(lora.target_modules)}: name the layers in the expression"
        )


def _listed(value: list[str] | str | None) -> list[str]:
    return [value] if isinstance(value, str) and value else list(value or ())


def _has_layers(limits: LimitsFile) -> bool:
    return limits.layers_to_transform not in (None, [])


def _is_adapted(module: str, lora: LoraConfig, limits: LimitsFile) -> bool:
    """Return whether PEFT adapts a module of this name."""
    excluded, targets = limits.exclude_modules, lora.target_modules
    if excluded and isinstance(excluded, str) and re.fullmatch(excluded, module):
        return False
    if isinstance(excluded, list) and any(ends_with(module, name) for name in excluded):
        return False
    if any(re.match(rf"(^|.*\.){re.escape(name)}($|\..*)", module) for name in lora.modules_to_save):
        return False
    if isinstance(targets, str):
        if targets == ALL_LINEAR:
            return True
        try:
            return re.fullmatch(targets, module) is not None
        except NO_PATTERN:  # `match_targets` says so
            return False
    if module in targets:
        return True
    return any(ends_with(module, target) for target in targets) and _is_in_layers(module, limits)


def _is_in_layers(module: str, limits: LimitsFile) -> bool:
    if not _has_layers(limits):
        return True
    patterns = [_LAYERS.replace("PATTERN", pattern) for pattern in _listed(limits.layers_pattern)] or [_ANY_LAYERS]
    found = next((match for pattern in patterns if (match := re.match(pattern, module))), None)
    layers = limits.layers_to_transform
    return found is not None and int(found[1]) in (layers if isinstance(layers, list) else [layers])
