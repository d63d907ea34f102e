"""A call of a kernel: NumPy arrays and numbers in, arrays out; and the argument segment that HIP would make."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.hip.executor.code_object import ExecutorError
from tests.hip.executor.kernel import Kernel
from tests.hip.executor.memory import Guarded
from tests.hip.executor.waves import Grid, Launch, Order, run


class Out(NamedTuple):
    """An array that the kernel fills: NaN before, -1 in integers."""

    shape: tuple[int, ...]
    dtype: Any


Argument = np.ndarray | np.generic | Out | None


def segment(kernel: Kernel, packed: bytes, grid: Grid, threads: int) -> Guarded:
    """The kernel's argument segment: the packed arguments as HIP copies them, and the hidden ones.

    Raises:
        ExecutorError: the packed arguments end before or behind the last one that the kernel declares.
    """
    declared = kernel.metadata.get(".args", [])
    end = max((a[".offset"] + a[".size"] for a in declared if not a[".value_kind"].startswith("hidden_")), default=0)
    if len(packed) != end:
        raise ExecutorError(f"{kernel.name}: {len(packed)} bytes of arguments, the kernel declares {end}")
    size = max(kernel.metadata.get(".kernarg_segment_size", 0), kernel.descriptor.arguments, 16)
    made = Guarded(size)
    ctypes.memmove(made.address, packed, len(packed))
    hidden = {f"hidden_block_count_{axis}": n for axis, n in zip("xyz", grid)}
    hidden |= {f"hidden_group_size_{axis}": n for axis, n in zip("xyz", (threads, 1, 1))}
    for a in declared:
        if (value := hidden.get(a[".value_kind"])) is not None:
            ctypes.memmove(made.address + a[".offset"], value.to_bytes(a[".size"], "little"), a[".size"])
    return made


class Call:
    """A kernel with its arguments in guarded memory, in the kernel's order. threads: of a work-group, along x.

    Raises:
        ExecutorError: other arguments than the kernel declares.
    """

    def __init__(self, kernel: Kernel, grid: Grid, threads: int, arguments: Sequence[Argument]) -> None:
        declared = [a for a in kernel.metadata.get(".args", []) if not a[".value_kind"].startswith("hidden_")]
        if len(declared) != len(arguments):
            names = ", ".join(a.get(".name", "?") for a in declared)
            raise ExecutorError(f"{kernel.name} takes {len(declared)} arguments ({names}), {len(arguments)} were given")
        self._arrays: list[tuple[Guarded, Any, tuple[int, ...]]] = []
        packed = b""
        for about, value in zip(declared, arguments):
            packed += bytes(about[".offset"] - len(packed))
            packed += value.tobytes() if isinstance(value, np.generic) else struct.pack("<Q", self._pointer(value))
        self._segment = segment(kernel, packed, grid, threads)
        self.launch = Launch(kernel, grid, threads, self._segment.address, self._around)

    def _pointer(self, value: np.ndarray | Out | None) -> int:
        if value is None:
            return 0
        dtype = np.dtype(value.dtype)
        if isinstance(value, Out):
            made = Guarded(int(np.prod(value.shape)) * dtype.itemsize, fill=0xFF)
        else:
            made = Guarded(value.nbytes)
            made.view(dtype)[:] = value.ravel()
        self._arrays.append((made, dtype, value.shape))
        return made.address

    def _around(self, address: int) -> str:
        for number, (memory, dtype, shape) in enumerate(self._arrays):
            if memory.holds(address):
                return f"{address - memory.address:+d} bytes from the start of array {number}, {dtype} {shape}"
        return "not near any array"

    def results(self) -> list[np.ndarray]:
        """Return the arrays' values, in the kernel's order, and free the arrays.

        Raises:
            ExecutorError: bytes just outside of one were written.
        """
        found = []
        for number, (memory, dtype, shape) in enumerate(self._arrays):
            if not memory.untouched():
                raise ExecutorError(f"{self.launch.kernel.name}: bytes just outside of array {number} were written")
            found.append(memory.view(dtype).reshape(shape).copy())
        self.free()
        return found

    def free(self) -> None:
        for memory in (*(a[0] for a in self._arrays), self._segment):
            memory.free()


def call(kernel: Kernel, grid: Grid, threads: int, arguments: Sequence[Argument], order: Order = "fwd") -> list[Any]:
    """Run a kernel on copies of the arrays, and return their contents afterwards, in the kernel's order.

    Raises:
        ExecutorError: what a GPU would not survive, or the executor does not know.
    """
    made = Call(kernel, grid, threads, arguments)
    run(made.launch, order)
    return made.results()
