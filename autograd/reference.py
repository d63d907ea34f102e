"""The NumPy device `cpu`: the reference of every operator (autograd/ops), with bookkeeping.

Precision: float64 arguments are computed and returned in float64, whatever `dtype` says (the oracle is never rounded,
except by `cast`). All others are computed in float32 and rounded to the given dtype.
"""

from __future__ import annotations

import functools
import platform
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wgrad.autograd.bind import bind
from wgrad.autograd.decoded_weights import DecodedWeights, forget_decoded, kept_in, owner_of
from wgrad.autograd.operators import OPERATORS
from wgrad.device.contract import SCRATCH_BYTES
from wgrad.device.errors import DeviceError, DeviceLost
from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.memory import MemoryStats
from wgrad.device.openblas import one_blas_thread
from wgrad.device.roof import Expectation, Roof
from wgrad.device.runtime import HostCopy, check_upload


class _Pool:
    """Counts the bytes of living arrays. A view keeps the owner of its memory alive, so owners are counted."""

    def __init__(self) -> None:
        self.in_use_bytes = 0
        self.peak_bytes = 0
        self._owners: dict[int, weakref.ref[np.ndarray]] = {}

    def track(self, array: np.ndarray) -> None:
        owner = owner_of(array)
        key, nbytes = id(owner), owner.nbytes
        if key in self._owners:
            return

        def release(_: object) -> None:
            del self._owners[key]
            self.in_use_bytes -= nbytes

        self._owners[key] = weakref.ref(owner, release)
        self.in_use_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)


class ReferenceReplay:
    """Recorded calls with their results; `run` computes them again into the same arrays."""

    def __init__(self, decoded: DecodedWeights) -> None:
        self.dispatches = 0
        self._decoded = decoded
        self._calls: list[tuple[Callable[[], Any], tuple[np.ndarray, ...]]] = []

    def append(self, call: Callable[[], Any], result: Any) -> None:
        self._calls.append((call, tuple(arrays_of(result))))
        self.dispatches += 1

    def run(self) -> None:
        with _computing(self._decoded):
            for call, arrays in self._calls:
                for old, new in zip(arrays, arrays_of(call())):
                    if old is not new:  # an operator with `out` has written there itself
                        old[...] = new


@contextmanager
def _computing(decoded: DecodedWeights) -> Iterator[None]:
    """Compute without warnings about infinity and NaN, as on every device."""
    with np.errstate(all="ignore"), kept_in(decoded), one_blas_thread():
        yield


def arrays_of(result: Any) -> Iterator[np.ndarray]:
    """Yield all NumPy arrays in an operator's result (an array, a tuple, a frozen weight or None)."""
    if isinstance(result, np.ndarray):
        yield result
    elif isinstance(result, tuple):
        for item in result:
            yield from arrays_of(item)
    elif isinstance(result, FrozenWeight):
        yield from arrays_of(tuple(result.arrays().values()))


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of arrays as a method of the reference device, which counts the results' memory and records the
    call while a recording runs."""

    @functools.wraps(function)
    def call(device: Any, *args: Any, **kwargs: Any) -> Any:
        with _computing(device._decoded):
            result = function(*args, **kwargs)
        for array in arrays_of(result):
            device._pool.track(array)
        if device._recording is not None:
            device._recording.append(functools.partial(function, *args, **kwargs), result)
        return result

    return call


@recorded
def _zeros(shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(tuple(shape), dtype)


@recorded
def _copy(src: np.ndarray, out: np.ndarray) -> None:
    forget_decoded(out)
    out[...] = src.reshape(out.shape)


@recorded
def _fill(out: np.ndarray, value: float) -> None:
    forget_decoded(out)
    out[...] = value


@bind
class ReferenceDevice:
    """Device `cpu`. Arrays are plain `np.ndarray`."""

    implementations = {name: recorded(op.numpy) for name, op in OPERATORS.items() if op.numpy is not None}
    name = "cpu"
    float16 = bfloat16 = shared_memory = host_buffers = True
    stacks_weights = reopens = needs_new_process = False
    fastest_compute = "float32"
    scratch_bytes = SCRATCH_BYTES

    def __init__(self) -> None:
        self.description = f"NumPy {np.__version__} on {platform.processor() or platform.machine()}"
        self.facts: dict[str, Any] = {"name": self.description}
        self.reason = "made directly"
        self._pool = _Pool()
        self._decoded = DecodedWeights(self._pool.track)
        self._recording: ReferenceReplay | None = None

    # ---- storage -------------------------------------------------------------------------
    def empty(self, shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
        return self._tracked(np.empty(tuple(shape), dtype))

    empty_host = empty
    zeros, copy, transfer, fill = _zeros, _copy, _copy, _fill

    def upload(self, host: np.ndarray) -> np.ndarray:
        check_upload(host)
        return self._tracked(np.array(host, order="C", copy=True))

    def write(self, array: np.ndarray, host: np.ndarray) -> None:
        self._decoded.forget(array)
        array[...] = host

    def download(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def readback(self, array: np.ndarray, out: np.ndarray | None = None) -> HostCopy:
        return HostCopy(array, out)

    def view(self, array: np.ndarray, shape: Sequence[int], offset: int = 0) -> np.ndarray:
        size = int(np.prod(tuple(shape), dtype=np.int64))
        return array.reshape(-1)[offset : offset + size].reshape(tuple(shape))

    def synchronize(self) -> None:
        return None

    def memory(self) -> MemoryStats:
        used, peak = self._pool.in_use_bytes, self._pool.peak_bytes
        return MemoryStats(used, peak, used, peak)  # NumPy allocates arrays one by one, and reserves nothing more

    def host_memory(self) -> MemoryStats:
        return MemoryStats(0, 0, 0, 0)  # `memory` counts it

    def free_memory(self) -> None:
        return None

    def copied_alongside(self, work: float) -> float:
        return 0.0

    def limit_memory(self, nbytes: int | None) -> None:
        return None

    def reset_peak(self) -> None:
        self._pool.peak_bytes = self._pool.in_use_bytes

    def reopen(self, losses: int) -> ReferenceDevice:
        raise DeviceLost("main memory is not lost")

    def dry_run(self) -> None:
        return None

    def kernel_caches(self) -> list[Path]:
        return []

    def prepare(self, dry: Any, progress: Callable[[int, int], None] | None = None) -> int:
        return 0

    def pipelines_compiled(self) -> int:
        return 0

    @property
    def identity(self) -> tuple[str, ...]:
        return ("NumPy", np.__version__)

    def details(self) -> dict[str, Any]:
        return {}

    def kernels_of(self, work: Callable[[Any], object]) -> list[tuple[str, str]]:
        return []

    def expect(self, kernels: Sequence[tuple[str, str]], flop: float, nbytes: float) -> Expectation | None:
        return None

    def sensors(self) -> dict[str, float]:
        return {}

    @property
    def simpler(self) -> tuple[str, ...]:
        return ()

    def trying_without(self, kinds: Collection[str]) -> AbstractContextManager[None]:
        return nullcontext()

    def turn_off(self, kind: str, reason: str) -> bool:
        raise NotImplementedError(kind)  # not in `simpler`

    def roofs(self) -> list[Roof]:
        return []

    def explain_linear(self, mnk: tuple[int, int, int], weight: str, backward: bool) -> str:
        return ""

    def profile(self, on: bool = True) -> bool:
        return False

    def profile_table(self) -> str:
        return ""

    def profile_times(self) -> dict[str, float]:
        return {}

    def caching_dequantized(self) -> AbstractContextManager[None]:
        return nullcontext()

    def dequantized_bytes(self, weight: Any, rows: int, dtype: Any, experts: int = 0) -> int:
        return 0  # `DecodedWeights` caches them anyway

    def keep_dequantized(self, weight: Any, rows: int, dtype: Any, experts: int = 0) -> None:
        pass

    def forget_dequantized(self) -> None:
        pass

    def borrowing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def round_products(self) -> None:
        raise DeviceError("NumPy has no faster matmuls of 8-bit integers")

    def rehearse(self) -> AbstractContextManager[None]:
        return nullcontext()

    def repeat(self, rehearsal: Any) -> bool:
        return False

    @contextmanager
    def capture(self, rehearsal: Any = None) -> Iterator[ReferenceReplay]:
        if self._recording is not None:
            raise RuntimeError("capture: a recording is already running on this device; end it before starting another")
        self._recording = ReferenceReplay(self._decoded)
        try:
            yield self._recording
        finally:
            self._recording = None

    def _tracked(self, array: np.ndarray) -> np.ndarray:
        self._pool.track(array)
        return array

    if TYPE_CHECKING:  # operators, which `bind` adds

        def __getattr__(self, name: str) -> Any: ...
