"""Launches and copies as they are submitted to a stream, and submitted again by a replay."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

HOST_TO_HOST, TO_DEVICE, TO_HOST = 0, 1, 2  # hipMemcpyKind


class Long(int):
    """An argument that a kernel takes as a 64-bit integer; a plain int is 32 bits."""


class Layout:
    """Arguments of these kinds (of `struct`), one after another in `arguments`, each aligned to its size.

    pointers: where each of them begins, as a launch takes it; then the end of the last, and 0. HIP itself reads as many
    as the kernel declares; by the two more, the runtimes of the tests see how many there are, of which sizes.
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
        """Their values in the kernel's order: addresses, whole numbers, floats."""
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
