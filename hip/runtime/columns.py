"""Columns of a matrix copied to a matrix of their own, and back. Kernel: storage.hip.

Stacks of weights need this, as no HIP kernel reads part of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from wgrad.device.memory import Array
from wgrad.hip.runtime.launch import Long
from wgrad.hip.runtime.runtime import Runtime


def take(device: Runtime, x: Array, first: int, count: int) -> Array:
    """Return x[:, first : first + count]."""
    part = device.empty((x.shape[0], count), x.dtype)
    _copy(device, _from_column(x, first), x.shape[1], part, count, part)
    return part


def put(device: Runtime, part: Array, out: Array, first: int) -> None:
    """Store part in out[:, first : first + part.shape[1]]."""
    _copy(device, part, part.shape[1], _from_column(out, first), out.shape[1], part)


def apart(device: Runtime, x: Array, widths: Sequence[int]) -> Iterator[Array]:
    """Split x into parts of these widths, from left to right."""
    first = 0
    for width in widths:
        yield take(device, x, first, width)
        first += width


def together(device: Runtime, parts: Sequence[Array]) -> Array:
    """Concatenate matrices along their columns."""
    out = device.empty((parts[0].shape[0], sum(part.shape[1] for part in parts)), parts[0].dtype)
    first = 0
    for part in parts:
        put(device, part, out, first)
        first += part.shape[1]
    return out


def _from_column(x: Array, first: int) -> Array:
    return Array(x.lease, x.offset + first * x.dtype.itemsize, (x.size - first,), x.dtype)


def _copy(device: Runtime, src: Array, src_row: int, out: Array, out_row: int, part: Array) -> None:
    pairs = part.dtype.itemsize // 2
    units, total = part.shape[1] * pairs, part.size * pairs
    arguments = [src, out, Long(total), units, src_row * pairs, out_row * pairs]
    device.launch("storage", "copy_columns", arguments, device.groups(total, 256), work=2 * part.nbytes)
