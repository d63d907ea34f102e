"""A device on which nothing runs: launches note what they would launch, and the pool says what memory it would take.

Which kernels a run needs hangs on shapes and dtypes alone, never on values, so that the same Python code on such a
device, without a byte of weights, gives all of them before the run begins; and its pool, with the same blocks leased
and returned in the same order, peaks where the real one will.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from wgrad.device.memory import Array, Pool
from wgrad.device.runtime import HostCopy, PooledRuntime


class Nothing:
    """The replay of work that did not run."""

    dispatches = 0

    def run(self) -> None:
        pass


class DryRuntime(PooledRuntime):
    """In front of a room's runtime: everything but `launch`. Its arrays belong to it alone; downloads give zeros."""

    def __init__(self, *, exact_blocks: bool = False) -> None:
        pools = (Pool(self._create_nothing, lambda block: None, exact=exact_blocks) for _ in range(2))
        self._pool, self._host_pool = pools

    def _create_nothing(self, nbytes: int) -> int:
        """OutOfMemory where the device has no array as large as this, however much is free."""
        return 0

    def _write_new(self, array: Array, host: np.ndarray) -> None:
        pass

    def write(self, array: Array, host: np.ndarray) -> None:
        pass

    def transfer(self, src: Array, out: Array) -> None:
        pass

    def download(self, array: Array) -> np.ndarray:
        return np.zeros(array.shape, array.dtype)

    def readback(self, array: Array, out: np.ndarray | None = None) -> Any:
        return HostCopy(self.download(array), out)

    def synchronize(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def pipelines_compiled(self) -> int:
        return 0

    def _new_replay(self) -> Any:
        return Nothing()


def chunk_starts(device: Any, count: int, rows: int) -> Sequence[int]:
    """Return where chunks of `rows` of `count` rows begin. A dry run makes the first two and the last: those between
    take the same memory as the second, and launch the same kernels."""
    every = range(0, count, rows)
    return (*every[:2], every[-1]) if isinstance(device, DryRuntime) and len(every) > 3 else every
