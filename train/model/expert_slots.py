"""A cache of experts on the device, for decoding with weights in main memory: each layer has slots for the weights of
the experts that its tokens used last (`autograd/ops/expert_slots.py`). Missing experts are copied from main memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from wgrad.device.contract import Array, Device
from wgrad.device.errors import WgradError
from wgrad.device.formats.frozen_weight import FrozenWeight

_OPERATORS = {"place_experts", "copy_experts"}
# The number of slots for each expert that the tokens of a step choose, at least. Kernels are then chosen as for all
# experts (`_READ_THERE` in streamed_weights.py), so results are the same bits.
SPARE_SLOTS = 4
_WORD = 4  # bytes that are copied at once


def by_expert(weight: Any, experts: int) -> dict[str, bool] | None:
    """Return for each array of a weight of experts whether it has a part of its own for each expert; else it is a table
    of all. None: experts share parts.

    weight: a FrozenWeight [E out, in], or an array with E rows.
    """
    if not isinstance(weight, FrozenWeight):
        return {"": True} if _divides(weight, experts) else None
    one = replace(weight, shape=(weight.shape[0] // experts, weight.shape[1]))  # type: ignore[type-var]
    of_one, of_all = ({name: size for name, size, _ in of.layout()} for of in (one, weight))
    found = {}
    for name, array in weight.arrays().items():
        size = of_all.get(name)
        if array is None:
            continue
        found[name] = size is None or of_one[name] != size
        if found[name] and not (_divides(array, experts) and (size is None or of_one[name] * experts == size)):
            return None
    return found


def _divides(array: Array, experts: int) -> bool:
    return bool(array.nbytes % (experts * _WORD) == 0)


class CannotKeep(WgradError):
    """The experts of a weight cannot be in slots."""


class ExpertSlots:
    """Slots of a layer.

    Args:
        weights: Weights of the layer's experts by name. Their arrays are read whenever an expert is missing.
        experts: Number of experts.
        slots: Number of slots, at most as many.

    Attributes:
        weights: Weights of the experts in slots, by name.
        number: Number of slots.

    Raises:
        CannotKeep: The device lacks an operator, or experts share scales.
    """

    def __init__(self, weights: Mapping[str, Any], experts: int, slots: int, device: Device) -> None:
        if lacked := _OPERATORS & device.lacks:
            raise CannotKeep(f"{device.name} lacks {', '.join(sorted(lacked))}: leave slots out")
        self._device, self._experts, self.number = device, experts, slots
        self._copies: list[tuple[Array, Array]] = []
        self._tables: list[tuple[Array, Array]] = []
        self.weights = {name: self._in_slots(name, weight) for name, weight in weights.items()}
        self._held = device.upload(np.full(slots, -1, np.int32))
        self._used, self._counts = (device.upload(np.zeros(size, np.int32)) for size in (slots, 3))
        for source, out in self._tables:
            device.transfer(source, out)

    def _in_slots(self, name: str, weight: Any) -> Any:
        own = by_expert(weight, self._experts)
        if own is None:
            raise CannotKeep(f"{name}: its {self._experts} experts share scales or words: leave slots out")
        if not isinstance(weight, FrozenWeight):
            made: Array = self._device.empty((self.number, *weight.shape[1:]), weight.dtype)
            self._copies.append((weight, made))
            return made
        rows, arrays = weight.shape[0] // self._experts, {}
        for part, array in weight.arrays().items():
            if array is not None:
                size = array.size // self._experts * self.number if own[part] else array.size
                arrays[part] = self._device.empty((size,), array.dtype)
                (self._copies if own[part] else self._tables).append((array, arrays[part]))
        return replace(weight, shape=(self.number * rows, weight.shape[1]), **arrays)  # type: ignore[type-var]

    def place(self, ids: Array) -> Array:
        """Copy the experts of ids, int32 [T, k], that are missing, and return the slots of all, int32 [T, k]."""
        slots, copies = self._device.place_experts(ids, self._held, self._used, self._counts, self._experts)
        for source, out in self._copies:
            self._device.copy_experts(copies, source, out, self._experts, self.number)
        found: Array = slots
        return found

    @property
    def use(self) -> tuple[int, int]:
        """Return how many experts were needed by all calls so far, and how many of them were missing."""
        _, needed, missing = self._device.download(self._counts).tolist()
        return needed, missing
