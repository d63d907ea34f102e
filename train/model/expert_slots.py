"""A cache of experts on the device, for decoding with weights in main memory: each layer has slots for the weights of
the experts that its tokens used last (`autograd/ops/expert_slots.py`). Missing experts are copied from main memory.

If tokens choose more experts than there are slots, as those of a prompt, the chosen ones are gathered into a buffer
with a place for each expert: from slots if they are there, else from main memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from wgrad.device.contract import Array, Device
from wgrad.device.errors import WgradError
from wgrad.device.formats.frozen_weight import FrozenWeight

_OPERATORS = {"place_experts", "copy_experts", "keep_experts", "gather_experts"}
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
        buffer: The weights, or some of them, by name as arrays on the device with a place for each expert, whose
            contents other layers may change.

    Attributes:
        weights: Weights of the experts in slots, by name.
        gathered: Weights of all experts in the buffer, by name. Only those that `gather` copied can be read.
        number: Number of slots.

    Raises:
        CannotKeep: The device lacks an operator, or experts share scales.
    """

    def __init__(
        self, weights: Mapping[str, Any], experts: int, slots: int, device: Device, buffer: Mapping[str, Any]
    ) -> None:
        if lacked := _OPERATORS & device.lacks:
            raise CannotKeep(f"{device.name} lacks {', '.join(sorted(lacked))}: leave slots out")
        self._device, self._experts, self.number = device, experts, slots
        self._copies: list[tuple[Array, Array, Array | None]] = []  # in main memory, in slots, in the buffer
        self._tables: list[tuple[Array, Array]] = []
        self.weights, self.gathered = dict[str, Any](), dict[str, Any]()
        for name, weight in weights.items():
            self.weights[name], gathered = self._in_slots(name, weight, buffer.get(name))
            if gathered is not None:
                self.gathered[name] = gathered
        self._held = device.upload(np.full(slots, -1, np.int32))
        self._used, self._counts = (device.upload(np.zeros(size, np.int32)) for size in (slots, 3))
        for source, out in self._tables:
            device.transfer(source, out)

    def _in_slots(self, name: str, weight: Any, place: Any) -> tuple[Any, Any]:
        """Return a weight of experts in slots, and that of all at `place` in the buffer, if any."""
        own = by_expert(weight, self._experts)
        if own is None:
            raise CannotKeep(f"{name}: its {self._experts} experts share scales or words: leave slots out")
        if not isinstance(weight, FrozenWeight):
            made: Array = self._device.empty((self.number, *weight.shape[1:]), weight.dtype)
            self._copies.append((weight, made, place))
            return made, place
        rows, arrays, places = weight.shape[0] // self._experts, {}, {} if place is None else dict(place.arrays())
        for part, array in weight.arrays().items():
            if array is None:
                continue
            if own[part]:
                arrays[part] = self._device.empty((array.size // self._experts * self.number,), array.dtype)
                self._copies.append((array, arrays[part], places.get(part)))
            else:
                arrays[part] = places[part] = self._device.empty((array.size,), array.dtype)
                self._tables.append((array, arrays[part]))
        kept = replace(weight, shape=(self.number * rows, weight.shape[1]), **arrays)  # type: ignore[type-var]
        return kept, None if place is None else replace(place, **places)

    def place(self, ids: Array) -> Array:
        """Copy the experts of ids, int32 [T, k], that are missing, and return the slots of all, int32 [T, k]."""
        slots, copies = self._device.place_experts(ids, self._held, self._used, self._counts, self._experts)
        for source, kept, _ in self._copies:
            self._device.copy_experts(copies, source, kept, self._experts, self.number)
        found: Array = slots
        return found

    def gather(self, start: Array, counted: bool) -> None:
        """Copy the experts that have rows into the buffer, and keep those with most rows in slots.

        start: the first row of each expert, int32 [E + 1]. counted: whether `use` counts them.
        """
        origins = self._device.keep_experts(start, self._held, self._used, self._counts, counted)
        for source, kept, place in self._copies:
            self._device.gather_experts(origins, source, kept, self.number, place)

    @property
    def use(self) -> tuple[int, int]:
        """Return how many experts were needed by all counted calls so far, and how many of them were missing."""
        _, needed, missing = self._device.download(self._counts).tolist()
        return needed, missing
