"""Kernel launches and copies, as objects that a replay can submit again."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

HOST_TO_HOST, TO_DEVICE, TO_HOST = 0, 1, 2  # hipMemcpyKind


class Long(int):
    """An argument that a kernel takes as a 64-bit integer; a plain int is 32 bits."""


class Layout:
    """Arguments of these types (`struct` codes), packed into `arguments`, each aligned to its size.

    pointers: Address of each argument, then the end of the last, and 0. HIP reads as many as the kernel declares; from
    the last two the tests' runtimes know the arguments' number and sizes.
    """

    def __init__(self, kinds: str, arguments: int) -> None:
        self.struct = struct.Struct(kinds)
        ends = [struct.calcsize(kinds[: n + 1]) for n in range(len(kinds))]
        starts = [end - struct.calcsize(kind) for end, kind in zip(ends, kinds)]
        places = [arguments + at for at in (*starts, self.struct.size)]
        self._pointers = (ctypes.c_void_p * (len(places) + 1))(*places, None)
        self.pointers = ctypes.addressof(self._pointers)


class Packed(NamedTuple):
    """The arguments of one launch."""

    layout: Layout
    values: bytes


@dataclass(frozen=True)
class Launch:
    """One kernel launch, ready to be issued again."""

    name: str
    function: Any
    grid: tuple[int, int, int]
    threads: int
    packed: Packed
    shapes: tuple[Any, ...]

    @property
    def arguments(self) -> str:
        """Return the arguments' values in the kernel's order: addresses, integers, floats."""
        return ", ".join(map(str, self.packed.layout.struct.unpack(self.packed.values)))

    def __str__(self) -> str:
        text = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in self.shapes)
        return f"kernel {self.name} on ({text}), {self.grid} work-groups of {self.threads}"


@dataclass(frozen=True)
class Transfer:
    """A copy between main memory and the GPU, ready to be issued again."""

    target: int
    source: int
    nbytes: int
    kind: int
    name = "transfer"

    def __str__(self) -> str:
        return f"a copy of {self.nbytes:,} bytes {'to' if self.kind == TO_DEVICE else 'from'} the GPU"
