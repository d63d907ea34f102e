"""Element types of shader variants, and arrays cut into pieces that fit one binding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from wgrad.device.errors import TooLarge
from wgrad.device.memory import Array
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime

GROUP = 256  # invocations of a workgroup
_NAMES = {"float32": "f32", "float16": "f16", "uint32": "u32", "int32": "i32"}
_FLAT_STEP = 1024


@cache  # NumPy is slow to name a dtype, and a launch asks for several
def wgsl_type(dtype: np.dtype, vec: int = 1) -> str:
    """The WGSL type of one number, or of four side by side."""
    name = _NAMES[np.dtype(dtype).name]
    return name if vec == 1 else f"vec{vec}<{name}>"


def wgsl_element(array: Array, vec: bool) -> str:
    """The WGSL type of an array's elements, one or four side by side."""
    return wgsl_type(array.dtype, 4 if vec else 1)


def compute_type(vec: int) -> str:
    """The WGSL type of arithmetic: float32, whatever is stored."""
    return wgsl_type(np.dtype(np.float32), vec)


def vector_width(*sizes: int) -> int:
    """4 (16-byte accesses) where every size is a multiple of it, else 1."""
    return 4 if all(n % 4 == 0 for n in sizes) else 1


def element_types(vec: int, **arrays: Array) -> dict[str, Constant]:
    """The type of arithmetic (C_T), and the element type of each array by its name in the shader."""
    return {"C_T": compute_type(vec), **{name: wgsl_type(array.dtype, vec) for name, array in arrays.items()}}


def same_block(a: Array, b: Array) -> bool:
    """Return whether both are in one buffer, so that one dispatch cannot read the one and write the other."""
    return a.lease.block is b.lease.block


def same_place(a: Array, b: Array) -> bool:
    return same_block(a, b) and a.offset == b.offset


def next_power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def flat_parts(
    device: Runtime, arrays: Sequence[Array], multiple: int = _FLAT_STEP, most: float = math.inf
) -> Iterator[tuple[int, list[Array]]]:
    """Flat pieces of arrays of one size, each within a binding: (first element, views).

    Pieces start at multiples of `multiple` elements. Arrays that fit are returned whole. most: elements of a piece,
    where `multiple` allows it.
    """
    size, widest = arrays[0].size, max(a.dtype.itemsize for a in arrays)
    if size == 0:
        return
    if size * widest <= device.max_binding_bytes and size <= most:
        yield 0, list(arrays)
        return
    step = device.max_binding_bytes // widest // multiple * multiple
    if most < step:
        step = max(int(most) // multiple, 1) * multiple
    if step == 0:
        raise TooLarge(f"{multiple} elements do not fit one binding of {device.max_binding_bytes} bytes")
    for at in range(0, size, step):
        yield at, [device.view(a, (min(step, size - at),), at) for a in arrays]


def row_parts(device: Runtime, arrays: Sequence[Array | None]) -> Iterator[tuple[int, int, list[Any]]]:
    """Pieces by rows (the first axis), each within a binding: (first row, number of rows, views)."""
    given = [a for a in arrays if a is not None]
    rows = given[0].shape[0]
    widest = max(a.nbytes // rows for a in given)
    if rows * widest <= device.max_binding_bytes:
        yield 0, rows, list(arrays)
        return
    # Rows from one that starts at a multiple of 256 bytes, where a binding may begin, to the next (powers of two).
    align = max(256 // math.gcd(a.nbytes // rows, 256) for a in given)
    step = device.max_binding_bytes // widest // align * align
    if step == 0:
        raise TooLarge(
            f"{align} rows of {widest:,} bytes do not fit one binding of {device.max_binding_bytes:,} bytes;"
            " use a smaller batch or sequence length"
        )
    for at in range(0, rows, step):
        count = min(step, rows - at)
        views = [
            None if a is None else device.view(a, (count, *a.shape[1:]), at * math.prod(a.shape[1:])) for a in arrays
        ]
        yield at, count, views
