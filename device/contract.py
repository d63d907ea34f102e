"""The contract between autograd and a device: storage, recording, memory, and what is asked of one besides operators.

The operators stand in autograd/ops, each with its signature, its rules and its reference; a device room enters its
implementations in a table (`implementations.py`), and `autograd/bind.py` joins both to what `select_device` hands out.
There shapes, dtypes and errors are checked, once; an implementation never checks them again.

Letters: B batch, T query tokens, S key tokens, M N K of a matmul, H heads, G key/value heads,
D head width, C channels, V vocabulary, R rows, r LoRA rank. Arrays are row-major and contiguous.
An `Array` is whatever the device uses: `np.ndarray` on the reference, `memory.Array` on the others;
both have `.shape`, `.dtype` (a NumPy dtype, bfloat16 through ml_dtypes), `.size` and `.nbytes`.

Unless said otherwise an operator reads float32, float16 or (where the device has `bfloat16`) bfloat16
arrays, computes in float32 and returns the dtype named by its `dtype` argument (default: the dtype of
its first array). The reference computes
in the widest dtype it is given, so that float64 inputs give a float64 oracle.
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
DELTA_CHUNK = 64  # tokens that the gated delta rule takes at once


def delta_segment(rows: int) -> int:
    """Tokens between two states that the gated delta rule keeps for its backward. rows: heads of all sequences, each of
    which takes scratch memory for so many tokens."""
    return DELTA_CHUNK * max(4, min(32, 512 // rows))


def delta_segments(rows: int, tokens: int) -> list[tuple[int, int]]:
    """The first token of each segment of a sequence, and its chunks. rows: as of `delta_segment`."""
    longest = delta_segment(rows)
    return [(at, -(-min(longest, tokens - at) // DELTA_CHUNK)) for at in range(0, tokens, longest)]


class Readback(Protocol):
    """An array on its way to the host, as it was when `readback` was called."""

    def ready(self) -> bool:
        """True once `result` would not wait."""

    def result(self) -> np.ndarray:
        """Wait for the array. May be called once."""


class Replay(Protocol):
    """A recorded stretch of device work: `run()` submits it again on the same arrays, without Python's graph."""

    dispatches: int

    def run(self) -> None: ...


@runtime_checkable
class Device(Protocol):
    name: str  # "cpu", "wgpu", "hip"
    description: str  # one line for people: GPU, driver, backend
    facts: dict[str, Any]  # the same for reports: name; where known also backend, type, driver, memory_bytes, ...
    reason: str  # why this one was taken, for people
    float16: bool  # float16 arrays are supported
    bfloat16: bool  # bfloat16 activations are; bfloat16 weights are everywhere

    stacks_weights: bool  # one matmul with several weights under one another costs less than one with each
    shared_memory: bool  # its memory is the main memory: nothing is gained by keeping arrays on the host
    host_buffers: bool  # it has `empty_host`
    reopens: bool  # it can be opened anew in this process when it was lost (`reopen`)
    needs_new_process: bool  # once it was lost no call of this process reaches it, but a new process can open it
    lacks: frozenset[str]  # operators that it declares not to have: a call of one raises OperatorMissing

    @property
    def identity(self) -> Sequence[str]:
        """Key of verdicts on its kernels: GPU, driver, and a digest of kernels that have none in `launched`."""

    @property
    def simpler(self) -> Sequence[str]:
        """Kinds of kernels that it uses and could do without, in words; the least loss first."""

    @property
    def fastest_compute(self) -> str:
        """The type of activations that it is fastest in: one of 16 bits only where its tensor cores take it."""

    # ---- storage -------------------------------------------------------------------------
    def empty(self, shape: Sequence[int], dtype: DType = np.float32) -> Array:
        """Uninitialised array; its memory returns to the pool when the last reference goes."""

    def empty_host(self, shape: Sequence[int], dtype: DType = np.float32) -> Array:
        """Uninitialised array in main memory, which the device reads and writes by itself: for `transfer`, `write`,
        `download`, and operators that read little of it. It does not count as the device's memory. Raises DeviceError
        where the device cannot."""

    def transfer(self, src: Array, out: Array) -> None:
        """out = src, whole arrays of the same size and dtype, one of them made by `empty_host`. In order with all other
        work, and part of a recording; the host does not wait."""

    def zeros(self, shape: Sequence[int], dtype: DType = np.float32) -> Array: ...

    def upload(self, host: np.ndarray) -> Array:
        """Copy a NumPy array (any dtype; int64 is refused: convert first) to the device."""

    def write(self, array: Array, host: np.ndarray) -> None:
        """Overwrite an array in place (same shape and dtype). The storage stays, so a Replay sees the new values."""

    def download(self, array: Array) -> np.ndarray:
        """Wait for the device and copy an array to the host."""

    def readback(self, array: Array, out: np.ndarray | None = None) -> Readback:
        """Start copying an array to the host without waiting; what comes after may overwrite it.

        out: where it goes (same shape and dtype, contiguous): written between this call and the end of `result`, which
        returns it. Without it the result is a new array."""

    def view(self, array: Array, shape: Sequence[int], offset: int = 0) -> Array:
        """Same storage, starting `offset` elements in; writes show in both. A non-zero offset is a multiple of 64."""

    def copy(self, src: Array, out: Array) -> None:
        """out = src; same size and dtype."""

    def fill(self, out: Array, value: float) -> None:
        """out = value, everywhere (float32, or 16 bits)."""

    def synchronize(self) -> None:
        """Wait until all submitted work is done; raise DeviceError if the device was lost on the way."""

    def reopen(self, losses: int) -> Any:
        """Open a device like this one, which is lost, with the same settings; it is given half as much work at once for
        each of the losses so far. DeviceLost: it does not open again in some seconds, or `reopens` is False."""

    def memory(self) -> MemoryStats: ...

    def host_memory(self) -> MemoryStats:
        """Bytes in the arrays made by `empty_host`."""

    def free_memory(self) -> int | None:
        """Bytes of device memory that this process can still take, as its driver has it now; None where it does not
        tell, or where that is main memory."""

    def copied_alongside(self, work: float) -> float:
        """Bytes that `transfer` brings to main memory while matmuls of so many FLOP run, at no cost in time."""

    def limit_memory(self, nbytes: int | None) -> None:
        """From now on an allocation that would bring what the driver has given (in use, or free in the pool) above this
        raises OutOfMemory. None: no limit. The reference does not hold to it."""

    def reset_peak(self) -> None: ...

    def pipelines_compiled(self) -> int:
        """Pipelines compiled since the device was made (0 on the reference): after the first step it must not grow."""

    def dry_run(self) -> Any:
        """A device of the same operators and memory pool on which nothing runs: work on it shows which kernels this one
        will need (`prepare`; `launched` lists them, each as file, entry point and constants, of which one may be a
        digest of the source) and, by its `memory()`, how much memory. Arrays belong to one of the two; downloads give
        zeros. None where the device has no such thing."""

    def prepare(self, dry: Any, progress: Callable[[int, int], None] | None = None) -> int:
        """Compile the kernels that the work on `dry` needs and that are not compiled yet; -> how many those were.
        progress: called with (done, in all). What does not compile is reported where it is launched."""

    def details(self) -> dict[str, Any]:
        """Return more facts for a report of the GPU, as JSON: those that take time, or that few devices have."""

    def kernels_of(self, work: Callable[[Any], object]) -> list[tuple[str, str]]:
        """Return source and name of each kernel that `work` launches on a dry run; none where `expect` knows none."""

    def expect(self, kernels: Sequence[tuple[str, str]], flop: float, nbytes: float) -> Expectation | None:
        """Return what a model predicts, that was made without such a GPU, for an operator of these kernels; None where
        there is no model."""

    def sensors(self) -> dict[str, float]:
        """Return the clocks in MHz, power in W and temperature in °C at this moment, as far as they are known."""

    def kernel_caches(self) -> list[Path]:
        """Folders, which need not exist, in which compiled kernels may be kept from one process to the next."""

    def caching_dequantized(self) -> AbstractContextManager[None]:
        """Inside the block a frozen weight that this device decodes before its matmuls is decoded once, as long as
        there is memory for it, and what was decoded is kept to the block's end. It changes no bit, also where a weight
        is written to. May be nested."""

    def dequantized_bytes(self, weight: Any, rows: int, dtype: DType, experts: int = 0) -> int:
        """Return the bytes that a frozen weight's dequantised values take; 0 where its matmuls decode it inside.

        rows: of its input, in a linear layer or in all experts together. dtype: of the input. experts: of which it
        holds the weights; 0: none."""

    def keep_dequantized(self, weight: Any, rows: int, dtype: DType, experts: int = 0) -> None:
        """Dequantise a frozen weight once, for all its matmuls from now on: they give the same bits. It takes
        `dequantized_bytes` as long as the weight lives, which must not be written to. Outside of a recording."""

    def forget_dequantized(self) -> None:
        """Let go of what `keep_dequantized` made. Recordings made before keep what they read."""

    def borrowing(self) -> AbstractContextManager[None]:
        """Inside the block arrays may lie in the memory that recordings keep for their replays. None of those that were
        recorded before may run in it, and nothing made in it may be read once one has."""

    def rehearse(self) -> AbstractContextManager[Any]:
        """The work inside the block will be recorded next: the block gets what `capture` is given for it, so that the
        recording's arrays share few blocks of memory. None where memory has no limit."""

    def capture(self, rehearsal: Any = None) -> AbstractContextManager[Any]:
        """Record all device work issued inside the block (it also runs); the block gets a Replay. Arrays made
        inside may be dropped after it: their memory stays reserved for the replay as scratch as long as there
        is one, and holds nothing between replays. rehearsal: of the same work; where it turns out to be another, its
        memory is placed as that of any."""

    def round_products(self) -> None:
        """From now on matmuls of many rows with frozen weights are made of both rounded to 8 bits, 64 elements by one
        scale: faster on some GPUs, with an error of about 0.8 %. DeviceError where there is nothing to gain."""

    def trying_without(self, kinds: Collection[str]) -> AbstractContextManager[None]:
        """Inside the block the device does without these of its `simpler` kinds of kernels."""

    def turn_off(self, kind: str, reason: str) -> bool:
        """From now on do without a kind of kernels, one of `simpler`; -> whether a device that is opened again has to
        be told again."""

    def roofs(self) -> list[Roof]:
        """Work that reaches the limits of the device's arithmetic; none where it has no such kernels."""

    def explain_linear(self, mnk: tuple[int, int, int], weight: str, backward: bool) -> str:
        """The kernel of a linear layer's GEMM, in words, "" where none is chosen by size.

        mnk: tokens, outputs, inputs. weight: a dtype, or a format of frozen weights. backward: the gradient of the
        layer's input. Activations are in `fastest_compute`.
        """

    def profile(self, on: bool = True) -> bool:
        """Time every launch from now on, which slows them; False where there are no kernels to time. Raises DeviceError
        where the device cannot."""

    def profile_table(self) -> str:
        """Per kernel: calls, total and mean time, share. Empty without `profile()`."""

    def profile_times(self) -> dict[str, float]:
        """Return the nanoseconds of each kernel. Empty without `profile()`."""

    if TYPE_CHECKING:  # the operators, which stand in autograd/ops: `autograd/bind.py` makes them methods of a device

        def __getattr__(self, name: str) -> Any: ...
