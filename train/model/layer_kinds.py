"""Kinds of a model's layers: in a dry run, layers of the same kind take the same memory."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.train.model.lora import LoraModule
from wgrad.train.model.streamed_weights import StreamedWeights

_LAYERS = "model.layers."


def layer_kind(model: Any, index: int) -> Hashable:
    """Return a layer's kind: all that the memory of its passes depends on, besides the arguments. model: a `Model`."""
    adapter, kinds = model.kinds
    if not kinds or adapter is not model.adapter:  # as in a pass of the base model alone
        kinds = _kinds(model)
        model.kinds = model.adapter, kinds
    recomputed = model.recomputed
    return kinds[index], index < recomputed, model.kept.chunks(index, recomputed), model.dequantized.get(index)


def listed(part: Any, layers: int) -> list[tuple[Any, ...]]:
    """Return the values of a configuration, and of its parts, that are lists with an entry for each layer."""
    found = []
    for each in fields(part):
        value = getattr(part, each.name)
        if is_dataclass(value):
            found += listed(value, layers)
        elif isinstance(value, tuple) and len(value) == layers:
            found.append(value)
    return found


def _kinds(model: Any) -> dict[int, str]:
    """Return the kind of each layer: its entries in lists of the configuration, its weights, and their adapters."""
    layers = model.config.num_hidden_layers
    kinds: dict[int, list[Any]] = {index: [] for index in range(layers)}
    for values in listed(model.config, layers):
        for index, value in enumerate(values):
            kinds[index].append(value)
    weights, adapted = model.weights, model.adapter.modules if model.adapter else {}
    for named in weights.by_name if isinstance(weights, StreamedWeights) else weights, adapted:
        for name, value in named.items():
            if name.startswith(_LAYERS):
                number, _, rest = name.removeprefix(_LAYERS).partition(".")
                kinds[int(number)].append((rest, _form(value)))
    return {index: repr(kind) for index, kind in kinds.items()}


def _form(value: Any) -> Any:
    """Return the shapes and dtypes of a weight or an adapter."""
    if isinstance(value, FrozenWeight):
        return value.variant, value.shape, value.parts, _form(value.arrays())
    if isinstance(value, Mapping):
        return [(name, _form(part)) for name, part in value.items()]
    if isinstance(value, LoraModule):
        parts = value.a, value.b, value.magnitude, value.inverse, value.rounded, value.own
        return [*map(_form, parts), value.variant, value.shares]
    return value if value is None else (tuple(value.shape), str(value.dtype))
