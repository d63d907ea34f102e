"""Cache of frozen weights that NumPy's matmuls have decoded, in float32, as far as main memory allows.

On the CPU, a step decodes each weight two or three times, and a generated token once. With GGUF's formats, that takes
several times as long as the matmul of one row. Cached values are those that would be decoded again, so no bit changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.main_memory import free_memory

_SHARE = 4  # a quarter of the free main memory is used
_UNKNOWN = 1 << 30  # bytes to use if the system does not report free memory
_CHUNK = 1 << 20  # elements that are decoded at once


class DecodedWeights:
    """Decoded weights of a device, by identity. Not thread-safe: a device is used by one thread at a time.

    track: counts an array's memory. budget: bytes; None: a share of what is free at the first weight.
    """

    def __init__(self, track: Callable[[np.ndarray], None], budget: int | None = None) -> None:
        self.kept_bytes = 0
        self._track = track
        self._budget = budget
        self._kept: dict[int, np.ndarray] = {}
        self._written: set[int] = set()
        self._of_owner: dict[int, set[int]] = {}

    def rows(self, weight: FrozenWeight, first: int, last: int, compute: np.dtype) -> np.ndarray:
        """Return `weight.rows`, from the cache if possible."""
        if compute != np.float32:
            return weight.rows(first, last, compute)
        key = id(weight)
        if key not in self._kept and not self._keep(weight):
            return weight.rows(first, last, compute)
        return self._kept[key][first:last]

    def forget(self, array: np.ndarray) -> None:
        """Stop caching the weights that use an array's memory, because it is written to."""
        for key in self._of_owner.get(id(owner_of(array)), ()):
            self._written.add(key)
            self._drop(key)

    def _keep(self, weight: FrozenWeight) -> bool:
        rows, columns = weight.shape
        if self._budget is None:
            free = free_memory()
            self._budget = _UNKNOWN if free is None else free // _SHARE
        key, nbytes = id(weight), 4 * rows * columns
        if key in self._written or self.kept_bytes + nbytes > self._budget:
            return False
        values = np.empty(weight.shape, np.float32)
        step = max(1, _CHUNK // columns)
        for first in range(0, rows, step):
            last = min(rows, first + step)
            values[first:last] = weight.rows(first, last, values.dtype)
        owners = {id(owner_of(array)) for array in weight.arrays().values() if array is not None}
        for owner in owners:
            self._of_owner.setdefault(owner, set()).add(key)
        weakref.finalize(weight, self._gone, key, owners).atexit = False
        self._kept[key] = values
        self._track(values)
        self.kept_bytes += nbytes
        return True

    def _gone(self, key: int, owners: set[int]) -> None:
        self._drop(key)
        self._written.discard(key)
        for owner in owners:
            self._of_owner[owner].discard(key)
            if not self._of_owner[owner]:
                del self._of_owner[owner]

    def _drop(self, key: int) -> None:
        values = self._kept.pop(key, None)
        if values is not None:
            self.kept_bytes -= values.nbytes


def owner_of(array: np.ndarray) -> np.ndarray:
    """Return the array that owns the memory of a view."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return owner


_current: ContextVar[DecodedWeights | None] = ContextVar("decoded_weights", default=None)


@contextmanager
def kept_in(weights: DecodedWeights) -> Iterator[None]:
    """Let `decoded_rows` use a cache in the block."""
    token = _current.set(weights)
    try:
        yield
    finally:
        _current.reset(token)


def decoded_rows(weight: FrozenWeight, first: int, last: int, compute: np.dtype) -> np.ndarray:
    """Return rows first..last of a weight, [last - first, in], in the dtype `compute`. Do not write to them."""
    weights = _current.get()
    return weight.rows(first, last, compute) if weights is None else weights.rows(weight, first, last, compute)


def forget_decoded(array: np.ndarray) -> None:
    """Stop caching weights in an array that is written to (`DecodedWeights.forget`)."""
    weights = _current.get()
    if weights is not None:
        weights.forget(array)
