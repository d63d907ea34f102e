"""Quantization of a layer's experts a few at a time, so that few of them are in memory in full precision."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from wgrad.device.contract import Array, Device
from wgrad.device.formats.nf4 import NF4Array
from wgrad.train.files.safetensors_files import TensorEntry
from wgrad.train.model.read_ahead import pieces as piece_bounds

PART_BYTES = 64 << 20  # about this many bytes are uploaded and quantized together
_VIEWS = 64  # views of an array begin at multiples of this many elements


def quantize_parts(
    entry: TensorEntry,
    dtype: np.dtype,
    device: Device,
    block_size: int,
    double: bool,
    contents: bool = True,
    pieces: Iterator[np.ndarray] | None = None,
) -> NF4Array:
    """Quantize a tensor [experts, out, in] of a file to one weight [experts out, in].

    The result has the same bits as if the tensor were quantized at once.

    Args:
        dtype: Dtype in which the tensor is uploaded.
        double: Whether to quantize the scales too.
        contents: False for a dry run, which reads nothing and allocates only the largest part.
        pieces: Pieces of the tensor in this dtype from `read_ahead`, which replace reading it.

    Raises:
        WgradError: The tensor is not finite.
    """
    size, columns = math.prod(entry.shape), entry.shape[-1]
    packed = device.empty((-(-size // 2),), np.uint8)
    absmax = device.empty((-(-size // block_size),), np.float32)
    aligned = _VIEWS * block_size
    if pieces is None or not contents:
        parts = _by_expert(entry, dtype, device, aligned, contents)
    else:
        parts = _by_piece(pieces, size, dtype, device)
    at = 0
    for part in parts:
        made = device.quantize(part, block_size)
        device.copy(made.packed, device.view(packed, made.packed.shape, at // 2))
        device.copy(made.absmax, device.view(absmax, made.absmax.shape, at // block_size))
        at += part.size
        del part, made  # so that the next ones reuse their memory
    plain = NF4Array(packed, absmax, (size // columns, columns), block_size)
    return device.quantize_scales(plain) if double else plain


def _by_expert(entry: TensorEntry, dtype: np.dtype, device: Device, aligned: int, contents: bool) -> Iterator[Array]:
    """Yield arrays of whole experts; all but the last begin and end at multiples of `aligned` elements."""
    count, *matrix = entry.shape
    width = math.prod(matrix)
    unit = aligned // math.gcd(aligned, width)
    rows = min(count, unit * max(1, PART_BYTES // (unit * width * dtype.itemsize)))
    if not contents:
        yield device.empty((rows * matrix[0], matrix[1]), dtype)
        return
    for block in entry.blocks(rows):
        values = np.ascontiguousarray(entry.check_finite(block), dtype)
        yield device.upload(values.reshape(-1, matrix[1]))


def _by_piece(pieces: Iterator[np.ndarray], size: int, dtype: np.dtype, device: Device) -> Iterator[Array]:
    """Yield arrays [1, n] of whole pieces. Pieces except the last have a power of two of elements."""
    bounds = list(piece_bounds(size, dtype.itemsize))
    together = max(1, PART_BYTES // (bounds[0][1] * dtype.itemsize))
    for first in range(0, len(bounds), together):
        part = bounds[first : first + together]
        array = device.empty((1, sum(count for _, count in part)), dtype)
        for begin, count in part:
            device.write(device.view(array, (count,), begin - part[0][0]), next(pieces))
        yield array
