"""The contract between autograd and a device: storage, recording, memory, and everything else besides operators.

The operators are in autograd/ops, each with its signature, its rules and its reference. A device package enters its
implementations in a table (`implementations.py`), and `autograd/bind.py` joins both into the result of `select_device`,
where arguments are checked; an implementation never checks them again.

Letters: B batch, T query tokens, S key tokens, M N K of a matmul, H heads, G key/value heads,
D head width, C channels, V vocabulary, R rows, r LoRA rank. Arrays are row-major and contiguous.
An `Array` is whatever the device uses: `np.ndarray` on the reference, `memory.Array` on the others;
both have `.shape`, `.dtype` (a NumPy dtype, bfloat16 through ml_dtypes), `.size` and `.nbytes`.

Unless stated otherwise, an operator reads float32, float16 or (if the device has `bfloat16`) bfloat16 arrays, computes
in float32, and returns the dtype named by its `dtype` argument (default: the dtype of its first array). The reference
computes in the widest dtype of its arguments, so that float64 inputs give a float64 oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from wgrad.device.memory import MemoryStats
from wgrad.device.roof import Expectation, Roof

Array = Any
DType = Any

MAX_HEAD_DIM = 512  # head width of attention
MAX_KEY_DIM = 256  # width of a key of the delta rule
PAGE = 64  # tokens of a page of a cache
DELTA_CHUNK = 64  # tokens of a chunk of the gated delta rule
SCAN_CHUNK = 64  # tokens between two states that selective_scan keeps for its backward
MAX_SCAN_STATES = 64  # of a channel in selective_scan
SCRATCH_BYTES = 768 << 20  # default of Device.scratch_bytes


def delta_segment(rows: int) -> int:
    """Return the number of tokens between two states that the gated delta rule keeps for its backward.

    rows: heads of all sequences, each of which takes scratch memory for a segment.
    """
    return DELTA_CHUNK * max(4, min(32, 512 // rows))


def delta_segments(rows: int, tokens: int) -> list[tuple[int, int]]:
    """Return the first token of each segment of a sequence, and its number of chunks. rows: as in `delta_segment`."""
    longest = delta_segment(rows)
    return [(at, -(-min(longest, tokens - at) // DELTA_CHUNK)) for at in range(0, tokens, longest)]


class Readback(Protocol):
    """An array on its way to the host, as it was when `readback` was called."""

    def ready(self) -> bool:
        """Return whether `result` would not wait."""

    def result(self) -> np.ndarray:
        """Wait for the array. May be called once."""


class Replay(Protocol):
    """Recorded device work: `run()` submits it again on the same arrays, without running the Python code."""

    dispatches: int

    def run(self) -> None: ...


@runtime_checkable
class Device(Protocol):
    name: str  # "cpu", "wgpu", "hip"
    description: str  # one line for the user: GPU, driver, backend
    facts: dict[str, Any]  # the same for reports: name; if known also backend, type, driver, memory_bytes, ...
    reason: str  # why this device was selected, for the user
    float16: bool  # whether float16 activations are supported; weights in both types always are
    bfloat16: bool  # whether bfloat16 activations are supported

    stacks_weights: bool  # one matmul with several weights stacked costs less than one with each
    shared_memory: bool  # its memory is main memory, so keeping arrays on the host gains nothing
    host_buffers: bool  # it has `empty_host`
    reopens: bool  # it can be opened again in this process after a loss (`reopen`)
    needs_new_process: bool  # after a loss this process cannot reach it, but a new process can open it
    scratch_bytes: int  # that an operator may take in addition to its outputs where that only saves time
    lacks: frozenset[str]  # operators that it declares to lack: calling one raises OperatorMissing

    @property
    def identity(self) -> Sequence[str]:
        """Key of the check results of its kernels: GPU, driver, and a digest of kernels without one in `launched`."""

    @property
    def simpler(self) -> Sequence[str]:
        """Kinds of kernels that it uses but could do without, in words; the least loss first."""

    @property
    def fastest_compute(self) -> str:
        """The dtype of activations in which it is fastest: 16 bits only if its tensor cores take it."""

    # ---- storage -------------------------------------------------------------------------
    def empty(self, shape: Sequence[int], dtype: DType = np.float32) -> Array:
        """Return an uninitialized array; its memory returns to the pool with the last reference to it."""

    def empty_host(self, shape: Sequence[int], dtype: DType = np.float32) -> Array:
        """Return an uninitialized array in main memory that the device can access: for `transfer`, `write`, `download`,
        and operators that read little of it. It does not count as the device's memory. Raises DeviceError if the device
        has none."""

    def transfer(self, src: Array, out: Array) -> None:
        """Copy src to out, whole arrays of the same size and dtype, one of them from `empty_host`. The copy is ordered
        with all other work, and part of recordings; the host does not wait."""

    def zeros(self, shape: Sequence[int], dtype: DType = np.float32) -> Array: ...

    def upload(self, host: np.ndarray) -> Array:
        """Copy a NumPy array (any dtype; int64 is refused: convert first) to the device."""

    def write(self, array: Array, host: np.ndarray) -> None:
        """Overwrite an array in place (same shape and dtype); a Replay sees the new values."""

    def download(self, array: Array) -> np.ndarray:
        """Wait for the device and copy an array to the host."""

    def readback(self, array: Array, out: np.ndarray | None = None) -> Readback:
        """Start copying an array to the host without waiting; later work may overwrite it.

        out: target (same shape and dtype, contiguous), which is written between this call and the end of `result`, and
        returned there; by default a new array."""

    def view(self, array: Array, shape: Sequence[int], offset: int = 0) -> Array:
        """Return an array that shares the memory from element `offset` on, which must be a multiple of 64."""

    def copy(self, src: Array, out: Array) -> None:
        """Copy src to out, of the same size and dtype."""

    def fill(self, out: Array, value: float) -> None:
        """Set all elements of out (float32, or 16-bit) to a value."""

    def synchronize(self) -> None:
        """Wait until all submitted work is done; raise DeviceError if the device was lost meanwhile."""

    def reopen(self, losses: int) -> Any:
        """Open this lost device again with the same settings, halving the work submitted at once for each loss so far.
        Raises DeviceLost if it does not open within some seconds, or `reopens` is False."""

    def memory(self) -> MemoryStats: ...

    def host_memory(self) -> MemoryStats:
        """Return the statistics of the arrays from `empty_host`."""

    def free_memory(self) -> int | None:
        """Return the bytes of device memory that this process can still take, by the driver; None if it does not tell,
        or if that is main memory."""

    def copied_alongside(self, work: float) -> float:
        """Return the bytes that `transfer` copies to main memory, without extra time, during matmuls of `work` FLOP."""

    def limit_memory(self, nbytes: int | None) -> None:
        """Let allocations raise OutOfMemory if the bytes taken from the driver (in use, or free in the pool) would
        exceed a limit. None: no limit. The reference ignores it."""

    def reset_peak(self) -> None: ...

    def pipelines_compiled(self) -> int:
        """Return the number of compiled pipelines (0 on the reference). After the first step it must not grow."""

    def dry_run(self) -> Any:
        """Return a device with the same operators and memory pool on which nothing runs, or None if there is none.

        Work on it shows which kernels this device will need (for `prepare`; `launched` lists them, each as file, entry
        point and constants, one of which may be a digest of the source), and by its `memory()` how much memory. Arrays
        belong to one of the two devices; downloads return zeros."""

    def prepare(self, dry: Any, progress: Callable[[int, int], None] | None = None) -> int:
        """Compile the kernels that the work on `dry` needs and that are not compiled yet; return their number.
        progress: called with (done, total). A kernel that does not compile is reported when it is launched."""

    def details(self) -> dict[str, Any]:
        """Return more facts for a report about the GPU, as JSON: those that take time, or that few devices have."""

    def kernels_of(self, work: Callable[[Any], object]) -> list[tuple[str, str]]:
        """Return source and name of each kernel that `work` launches on a dry run; none if `expect` has no model."""

    def expect(self, kernels: Sequence[tuple[str, str]], flop: float, nbytes: float) -> Expectation | None:
        """Return the prediction of a model for an operator with these kernels; None if there is no model.

        The model was made without such a GPU."""

    def sensors(self) -> dict[str, float]:
        """Return the current clocks in MHz, power in W and temperature in °C, as far as they are known."""

    def kernel_caches(self) -> list[Path]:
        """Return folders, which need not exist, in which compiled kernels may be kept between processes."""

    def caching_dequantized(self) -> AbstractContextManager[None]:
        """Within the block, keep the decoded values of frozen weights that this device decodes before matmuls, as long
        as there is memory. Results keep their bits, even if a weight is written to. May be nested."""

    def dequantized_bytes(self, weight: Any, rows: int, dtype: DType, experts: int = 0) -> int:
        """Return the bytes of a frozen weight's dequantized values; 0 if its matmuls decode it inside. For an array, an
        output layer: those of the copy that the loss multiplies with fastest; 0 if there is none.

        rows: of its input, in a linear layer or in all experts together. dtype: of the input. experts: number of
        experts whose weights it holds; 0: none."""

    def keep_dequantized(self, weight: Any, rows: int, dtype: DType, experts: int = 0) -> None:
        """Dequantize a frozen weight once for all later matmuls, which keep their bits. It takes `dequantized_bytes` as
        long as the weight lives, which must not be written to. Not within a recording."""

    def forget_dequantized(self) -> None:
        """Free the values of `keep_dequantized`. Earlier recordings keep those that they read."""

    def borrowing(self) -> AbstractContextManager[None]:
        """Within the block, let arrays use the memory that recordings keep for their replays. No earlier recording may
        run in it, and no array made in it may be read after one has."""

    def rehearse(self) -> AbstractContextManager[Any]:
        """Run work that will be recorded next; gives the argument for `capture`, so that the recording's arrays share
        few blocks of memory. None if memory has no limit."""

    def capture(self, rehearsal: Any = None) -> AbstractContextManager[Any]:
        """Record all device work within the block (it also runs), and give a Replay. Arrays made inside may be dropped
        after it: their memory stays reserved as scratch while the Replay exists, and has no contents between replays.
        rehearsal: of the same work; it is ignored from where the work differs."""

    def repeat(self, rehearsal: Any) -> bool:
        """Within `capture`, return whether rehearsed work needs not be done: a dry run can take its memory alone."""

    def round_products(self) -> None:
        """Compute later matmuls of many rows with frozen weights from operands rounded to 8 bits, with a scale per 64
        elements: faster on some GPUs, with an error of about 0.8 %. Raises DeviceError if nothing is gained."""

    def trying_without(self, kinds: Collection[str]) -> AbstractContextManager[None]:
        """Within the block, do without these kinds of kernels, which are among `simpler`."""

    def turn_off(self, kind: str, reason: str) -> bool:
        """Do without a kind of kernels from now on, one of `simpler`. Returns whether this must be repeated for a
        reopened device."""

    def roofs(self) -> list[Roof]:
        """Return work that reaches the limits of the device's arithmetic; [] if it has no such kernels."""

    def explain_linear(self, mnk: tuple[int, int, int], weight: str, backward: bool) -> str:
        """Describe the kernel of a linear layer's GEMM; "" if it is not chosen by size.

        mnk: tokens, outputs, inputs. weight: a dtype, or a format of frozen weights. backward: the gradient of the
        layer's input. Activations are in `fastest_compute`.
        """

    def profile(self, on: bool = True) -> bool:
        """Time every launch from now on, which slows them. Returns False if there are no kernels to time. Raises
        DeviceError if the device cannot time them."""

    def profile_table(self) -> str:
        """Return a table of calls, total and mean time, and share of each kernel. Empty without `profile()`."""

    def profile_times(self) -> dict[str, float]:
        """Return the nanoseconds of each kernel. Empty without `profile()`."""

    if TYPE_CHECKING:  # the operators of autograd/ops, which `autograd/bind.py` makes methods of a device

        def __getattr__(self, name: str) -> Any: ...
