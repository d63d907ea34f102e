"""Dequantised weights: those of a stretch of work that multiplies with each several times, and those kept for good."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from wgrad.device.errors import DeviceError
from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.memory import Array, Lease

_T = TypeVar("_T")


class DequantizedCache:
    """Dequantised weights by weight and form, while it is open; otherwise those alone that are kept."""

    def __init__(self) -> None:
        self._depth = 0
        self._arrays: dict[tuple[FrozenWeight, Hashable], Any] = {}  # a weight that is a key keeps its memory
        self._kept: WeakKeyDictionary[FrozenWeight, dict[Hashable, Any]] = WeakKeyDictionary()
        self._leases: WeakSet[Lease] = WeakSet()  # of the weights of which values are kept

    @contextmanager
    def open(self) -> Iterator[None]:
        """May be nested: the outermost ends it."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.drop()

    def get(self, weight: FrozenWeight, form: Hashable, decode: Callable[[], _T]) -> _T:
        """The weight's values in this form (a dtype, say): those in the cache, or what `decode` gives."""
        kept: _T | None = self._kept.get(weight, {}).get(form) if self._kept else None
        if kept is not None:
            return kept
        if not self._depth:
            return decode()
        found: _T | None = self._arrays.get((weight, form))
        if found is None:
            found = self._arrays[weight, form] = decode()
        return found

    def keep(self, weight: FrozenWeight, form: Hashable, values: Array) -> None:
        """From now on `get` gives these, until the weight is gone or `forget`."""
        self._kept.setdefault(weight, {})[form] = values
        self._leases.update(part.lease for part in weight.arrays().values() if part is not None)

    def forget(self) -> None:
        """Let go of those that are kept."""
        self._kept.clear()
        self._leases.clear()

    def drop(self) -> bool:
        """Return whether there was anything to let go but what is kept; it is decoded again where it is wanted."""
        any_there, self._arrays = bool(self._arrays), {}
        return any_there

    def written(self, array: Array | None) -> None:
        """Work that writes to this array was issued: what was decoded from that memory is no longer right.

        Raises DeviceError where that is kept, because recordings may read it.
        """
        if array is None:
            return
        if array.lease in self._leases and any(_consists_of(weight, array) for weight in self._kept):
            raise DeviceError(
                "a frozen weight whose dequantised values are kept was written to: load it before `keep_dequantized`"
            )
        for weight, form in list(self._arrays):
            if _consists_of(weight, array):
                del self._arrays[weight, form]


def _consists_of(weight: FrozenWeight, array: Array) -> bool:
    """Return whether an array of the weight lies in the same memory."""
    return any(part is not None and part.lease is array.lease for part in weight.arrays().values())
