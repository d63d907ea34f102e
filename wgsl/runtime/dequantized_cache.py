"""Cache of dequantised weights, for a stretch of work that multiplies with each of them several times."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.memory import Array

_T = TypeVar("_T")


class DequantizedCache:
    """Dequantised weights by weight and form, while it is open; empty otherwise."""

    def __init__(self) -> None:
        self._depth = 0
        self._arrays: dict[tuple[FrozenWeight, Hashable], Any] = {}  # a weight that is a key keeps its memory

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
        if not self._depth:
            return decode()
        found: _T | None = self._arrays.get((weight, form))
        if found is None:
            found = self._arrays[weight, form] = decode()
        return found

    def drop(self) -> bool:
        """Return whether there was anything to let go; it is decoded again where it is wanted."""
        any_there, self._arrays = bool(self._arrays), {}
        return any_there

    def written(self, array: Array | None) -> None:
        """Work that writes to this array was issued: what was decoded from that memory is no longer right."""
        if array is None or not self._arrays:
            return
        for weight, form in list(self._arrays):
            if any(part is not None and part.lease is array.lease for part in weight.arrays().values()):
                del self._arrays[weight, form]
