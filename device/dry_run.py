"""A device on which nothing runs: launches are only noted, and the pool measures the memory that they would take.

The kernels of a run depend only on shapes and dtypes, not on values. So the same Python code on such a device, without
weights, shows all of them before the run; and its pool, which leases and returns the same blocks in the same order, has
the peak of the real one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from wgrad.device.errors import OutOfMemory
from wgrad.device.memory import Array, Lease, Pool
from wgrad.device.placement import Rehearsal
from wgrad.device.runtime import HostCopy, PooledRuntime


class Nothing:
    """The replay of work that did not run."""

    dispatches = 0

    def run(self) -> None:
        pass


class DryRuntime(PooledRuntime):
    """Base of dry runtimes: everything but `launch`. Its arrays belong to it alone; downloads return zeros.

    repeats: work is not done again to be recorded, if only its memory matters, which `repeat` takes.
    """

    repeats = False

    def __init__(self, *, exact_blocks: bool = False) -> None:
        pools = (Pool(self._create_nothing, lambda block: None, exact=exact_blocks) for _ in range(2))
        self._pool, self._host_pool = pools

    def _create_nothing(self, nbytes: int) -> int:
        """Return a placeholder of a buffer. Subclasses raise OutOfMemory for arrays too large for the device."""
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

    @contextmanager
    def rehearse(self) -> Iterator[Rehearsal | None]:
        """As for `PooledRuntime`, but also without a limit if work is repeated."""
        with super().rehearse() as rehearsal:
            if rehearsal is None and self.repeats:
                rehearsal = self._pool.rehearsal = Rehearsal()
            yield rehearsal

    @contextmanager
    def capture(self, rehearsal: Rehearsal | None = None) -> Iterator[Any]:
        """As for `PooledRuntime`. Without a limit the rehearsal places no arrays, as in a run."""
        with super().capture(None if self._pool.limit is None else rehearsal) as replay:
            yield replay

    def repeat(self, rehearsal: Rehearsal) -> bool:
        """As for `PooledRuntime`. False where memory is short: the work may free cached values there."""
        if not self.repeats or (calls := rehearsal.calls()) is None:
            return False
        before, arrays = self._pool.state(), dict[int, Lease]()
        try:
            for number in calls:
                if number < 0:
                    del arrays[~number]
                else:
                    arrays[number] = self._pool.allocate(rehearsal.lives[number].nbytes)
        except OutOfMemory:
            arrays.clear()
            self._pool.restore(before)
            return False
        return True

    @contextmanager
    def tracing(self, trace: Any) -> Iterator[None]:
        """Notify a trace of all calls of the device's pool within the block, and `trace.elsewhere` of the other's."""
        self._pool.trace, self._host_pool.trace = trace, trace.elsewhere
        try:
            yield
        finally:
            self._pool.trace, self._host_pool.trace = None, None

    def pipelines_compiled(self) -> int:
        return 0

    def _new_replay(self) -> Any:
        return Nothing()


def chunk_starts(device: Any, count: int, rows: int) -> Sequence[int]:
    """Return the starts of chunks of `rows` in `count` rows. A dry run needs only the first two and the last, since the
    others take the same memory and kernels as the second."""
    every = range(0, count, rows)
    return (*every[:2], every[-1]) if isinstance(device, DryRuntime) and len(every) > 3 else every
