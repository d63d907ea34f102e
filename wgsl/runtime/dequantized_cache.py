"""Cache of dequantized weights, for work that multiplies with each several times, and those that are kept."""

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
    """Dequantized weights by weight and form. While closed, it has only those that are kept."""

    def __init__(self) -> None:
        self._depth = 0
        self._arrays: dict[tuple[FrozenWeight, Hashable], Any] = {}  # a weight that is a key keeps its memory
        self._kept: WeakKeyDictionary[FrozenWeight, dict[Hashable, Any]] = WeakKeyDictionary()
        self._leases: WeakSet[Lease] = WeakSet()  # of the weights of which values are kept
        self._dense: WeakKeyDictionary[Lease, dict[Hashable, Array]] = WeakKeyDictionary()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Cache values until the end of the outermost block."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.drop()

    def get(self, weight: FrozenWeight, form: Hashable, decode: Callable[[], _T]) -> _T:
        """Return the weight's values in this form (such as a dtype), from the cache or by `decode`."""
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
        """Make `get` return these values until the weight is gone or `forget` is called."""
        self._kept.setdefault(weight, {})[form] = values
        self._leases.update(part.lease for part in weight.arrays().values() if part is not None)

    def keep_dense(self, weight: Array, values: Array) -> None:
        """Make `dense` return these values until the weight's memory is free or `forget` is called."""
        self._dense.setdefault(weight.lease, {})[_place(weight)] = values

    def dense(self, weight: Array) -> Array | None:
        """Return what `keep_dense` was given for a weight that is no `FrozenWeight`, or None."""
        return self._dense[weight.lease].get(_place(weight)) if weight.lease in self._dense else None

    def forget(self) -> None:
        """Release the values that are kept."""
        self._dense.clear()
        self._kept.clear()
        self._leases.clear()

    def drop(self) -> bool:
        """Release cached values, except those kept; return whether there were any."""
        any_there, self._arrays = bool(self._arrays), {}
        return any_there

    def written(self, array: Array | None) -> None:
        """Invalidate what was decoded from this array, to which work that writes was issued.

        Raises:
            DeviceError: the values are kept, so that recordings may read them.
        """
        if array is None:
            return
        kept = array.lease in self._leases and any(_consists_of(weight, array) for weight in self._kept)
        if kept or (self._dense and array.lease in self._dense):
            raise DeviceError(
                "a frozen weight whose dequantized values are kept was written to: load it before `keep_dequantized`"
            )
        for weight, form in list(self._arrays):
            if _consists_of(weight, array):
                del self._arrays[weight, form]


def _place(array: Array) -> Hashable:
    """Return where an array lies in its memory, and its form."""
    return array.offset, array.shape, array.dtype_name


def _consists_of(weight: FrozenWeight, array: Array) -> bool:
    """Return whether an array of the weight lies in the same memory."""
    return any(part is not None and part.lease is array.lease for part in weight.arrays().values())
