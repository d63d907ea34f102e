"""Base of the runtimes with a memory pool: arrays, recording, profiles.

There are two pools: device memory, and main memory that the device reads and writes directly (`empty_host`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from wgrad.device.contract import SCRATCH_BYTES
from wgrad.device.errors import DeviceError, DeviceLost
from wgrad.device.kernel_times import Profiler
from wgrad.device.memory import Array, Lease, MemoryStats, Pool
from wgrad.device.placement import Rehearsal
from wgrad.device.roof import Expectation, Roof


def check_upload(host: np.ndarray) -> None:
    """Raise ValueError if no device holds arrays of this dtype."""
    if host.dtype == np.int64:
        raise ValueError(f"upload: int64 is not a device dtype (array of shape {host.shape}); convert it to int32")


class HostCopy:
    """`Readback` of a device whose results need no waiting."""

    def __init__(self, value: np.ndarray, out: np.ndarray | None = None) -> None:
        if out is not None:
            out[...] = value
        self._value = value.copy() if out is None else out

    def ready(self) -> bool:
        return True

    def result(self) -> np.ndarray:
        return self._value


class Recording:
    """Base of a device's `Replay`: the runtime and the memory that the recorded launches use."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        # Memory from outside of the recording, which must not be freed before it.
        self._leases: set[Lease] = set()


class PooledRuntime:
    """A device's storage, recording and profile (contract.py).

    A subclass adds `_pool`, `_host_pool`, `_fill_words`, `_write_new`, `_new_replay`, `_new_profiler`, launches, and
    copies to and from the host.
    """

    reason = "made directly"
    shared_memory = False
    host_buffers = True
    stacks_weights = False
    reopens = needs_new_process = False
    scratch_bytes = SCRATCH_BYTES
    _pool: Pool
    _host_pool: Pool
    _replay: Any = None  # the one that is being recorded
    profiler: Any = None

    # ---- storage -------------------------------------------------------------------------
    def empty(self, shape: Sequence[int], dtype: Any = np.float32) -> Array:
        dtype = np.dtype(dtype)
        return Array(self._pool.allocate(math.prod(shape) * dtype.itemsize), 0, shape, dtype)

    def empty_host(self, shape: Sequence[int], dtype: Any = np.float32) -> Array:
        dtype = np.dtype(dtype)
        return Array(self._host_pool.allocate(math.prod(shape) * dtype.itemsize), 0, shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: Any = np.float32) -> Array:
        array = self.empty(shape, dtype)
        self._fill_words(array, 0)
        return array

    def fill(self, out: Array, value: float) -> None:
        self._fill_words(out, int(np.asarray([value, value], out.dtype).view(np.uint32)[0]))

    def _fill_words(self, out: Array, word: int) -> None:
        """Set every four bytes of `out` to `word`."""
        raise NotImplementedError

    def upload(self, host: np.ndarray) -> Array:
        check_upload(host)
        array = self.empty(host.shape, host.dtype)
        self._write_new(array, host)
        return array

    def _write_new(self, array: Array, host: np.ndarray) -> None:
        """Write to a new array, which shares its memory with no other."""
        raise NotImplementedError

    def view(self, array: Array, shape: Sequence[int], offset: int = 0) -> Array:
        return Array(array.lease, array.offset + offset * array.dtype.itemsize, shape, array.dtype)

    def reopen(self, losses: int) -> Any:
        raise DeviceLost("this device cannot be opened again in the same process")

    def memory(self) -> MemoryStats:
        return self._pool.statistics()

    def host_memory(self) -> MemoryStats:
        return self._host_pool.statistics()

    def copied_alongside(self, work: float) -> float:
        return 0.0

    def limit_memory(self, nbytes: int | None) -> None:
        self._pool.limit = nbytes

    def reset_peak(self) -> None:
        self._pool.reset_peak()

    def trim(self) -> int:
        """Give free memory back to the driver. Return its bytes."""
        return self._pool.trim()

    def details(self) -> dict[str, Any]:
        return {}

    def kernels_of(self, work: Callable[[Any], object]) -> list[tuple[str, str]]:
        return []

    def expect(self, kernels: Sequence[tuple[str, str]], flop: float, nbytes: float) -> Expectation | None:
        return None

    def sensors(self) -> dict[str, float]:
        return {}

    @property
    def simpler(self) -> Sequence[str]:
        return ()

    def trying_without(self, kinds: Collection[str]) -> AbstractContextManager[None]:
        return nullcontext()

    def turn_off(self, kind: str, reason: str) -> bool:
        raise NotImplementedError(kind)  # not in `simpler`

    def roofs(self) -> list[Roof]:
        return []

    def explain_linear(self, mnk: tuple[int, int, int], weight: str, backward: bool) -> str:
        return ""

    def caching_dequantized(self) -> AbstractContextManager[None]:
        return nullcontext()

    def dequantized_bytes(self, weight: Any, rows: int, dtype: Any, experts: int = 0) -> int:
        return 0

    def keep_dequantized(self, weight: Any, rows: int, dtype: Any, experts: int = 0) -> None:
        pass

    def forget_dequantized(self) -> None:
        pass

    # ---- recording -----------------------------------------------------------------------
    def flush(self) -> None:
        """Submit waiting launches; there are none on devices that submit each at once."""

    def _new_replay(self) -> Any:
        raise NotImplementedError

    @contextmanager
    def borrowing(self) -> Iterator[None]:
        before, self._pool.borrowing = self._pool.borrowing, True
        try:
            yield
        finally:
            self._pool.borrowing = before

    @contextmanager
    def rehearse(self) -> Iterator[Rehearsal | None]:
        rehearsal = None if self._pool.limit is None else Rehearsal()
        self._pool.rehearsal = rehearsal
        try:
            yield rehearsal
        finally:
            self._pool.rehearsal = None

    def repeat(self, rehearsal: Rehearsal) -> bool:
        """Within `capture`, take and return the memory of rehearsed work in its place, and return whether that is the
        same. Only a dry run may: nothing is recorded."""
        return False

    @contextmanager
    def capture(self, rehearsal: Rehearsal | None = None) -> Iterator[Any]:
        """Run and record all launches inside. Uploads and downloads inside are not part of the replay."""
        if self._replay is not None:
            raise DeviceError("capture() inside capture() is not supported")
        self.flush()
        replay = self._replay = self._new_replay()
        pools = self._pool, self._host_pool
        self._pool.begin_capture(rehearsal)
        self._host_pool.begin_capture()
        try:
            yield replay
        finally:
            self.flush()
            for pool in pools:
                weakref.finalize(replay, pool.forget, pool.end_capture()).atexit = False
            self._replay = None

    def _keep(self, arrays: Iterable[Array | None]) -> None:
        """Keep the memory of these arrays of a launch alive as long as the recording, unless it is its own scratch."""
        self._replay._leases.update(a.lease for a in arrays if a is not None and not a.lease.is_scratch())

    # ---- profile -------------------------------------------------------------------------
    def _new_profiler(self) -> Profiler:
        raise NotImplementedError

    def profile(self, on: bool = True) -> bool:
        self.flush()
        self.profiler = self._new_profiler() if on else None
        return True

    def profile_table(self) -> str:
        self.flush()
        return self.profiler.table() if self.profiler is not None else ""

    def profile_times(self) -> dict[str, float]:
        self.flush()
        if self.profiler is None:
            return {}
        self.profiler.collect()
        return dict(self.profiler.total_ns)
