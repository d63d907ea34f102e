"""Reference NF4: quantise and dequantise, value for value what bitsandbytes makes.

Source: Dettmers et al., QLoRA (2023), section 3; levels and rounding as in bitsandbytes 0.50. The 8-bit map of
double quantisation is the dynamic data type of Dettmers et al., 8-bit Optimizers (2022), section 2.2.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from wgrad.autograd.reference_base import compute_dtype, finish, operator, up
from wgrad.device.contract import NF4Array

NF4_LEVELS = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
NF4_THRESHOLDS = (NF4_LEVELS[:-1] + NF4_LEVELS[1:]) / np.float32(2)
NESTED_BLOCK_SIZE = 256

# Byte -> its two levels, high nibble first.
_BYTE_LEVELS = np.stack([NF4_LEVELS[np.arange(256) >> 4], NF4_LEVELS[np.arange(256) & 15]], axis=1)


@cache
def dynamic_map() -> np.ndarray:
    """The signed 8-bit dynamic data type: float32 [256], rising, zero at index 127, one at 255.

    After the sign, e leading zeros give the decade 10^-e and the remaining 6 - e bits a linear fraction: the
    middles of 2^(6 - e) equal parts of [0.1, 1]. Zero and one are added by hand.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = _linspace_float32(0.1, 1.0, 2**decade + 1)
        middles = (edges[:-1] + edges[1:]) / np.float32(2)
        scaled = middles * np.float32(10 ** (decade - 6))
        values += [*scaled.tolist(), *(-scaled).tolist()]
    result = np.sort(np.array(values, np.float32))
    result.flags.writeable = False
    return result


def _linspace_float32(start: float, stop: float, count: int) -> np.ndarray:
    """Equal steps counted from both ends in float32, as torch.linspace does: the map must match to the bit."""
    first, last = np.float32(start), np.float32(stop)
    step = (last - first) / np.float32(count - 1)
    index = np.arange(count)
    up_half = (first.astype(np.float64) + step.astype(np.float64) * index).astype(np.float32)
    down_half = (last.astype(np.float64) - step.astype(np.float64) * (count - 1 - index)).astype(np.float32)
    return np.where(index < count // 2, up_half, down_half).astype(np.float32)


def _blocks(flat: np.ndarray, size: int) -> np.ndarray:
    """[n] -> [ceil(n / size), size], the last block filled with zeros."""
    count = -(-flat.size // size)
    if count * size == flat.size:
        return flat.reshape(count, size)
    padded = np.zeros(count * size, flat.dtype)
    padded[: flat.size] = flat
    return padded.reshape(count, size)


def _quantize_blocks(flat: np.ndarray, size: int, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 [n] and absmax [blocks]. A value on a threshold takes the lower code."""
    blocks = _blocks(flat, size)
    absmax = np.abs(blocks).max(axis=1)
    scaled = blocks * (flat.dtype.type(1) / np.maximum(absmax, flat.dtype.type(1e-38)))[:, None]
    codes = np.searchsorted(thresholds.astype(flat.dtype), scaled.reshape(-1)[: flat.size], side="left")
    return codes.astype(np.uint8), absmax


def restore_absmax(weight: NF4Array, compute: np.dtype) -> np.ndarray:
    """Absolute maximum of every block, with double quantisation undone."""
    if weight.nested_absmax is None or weight.nested_code is None or weight.nested_offset is None:
        return up(weight.absmax, compute)
    outer = np.repeat(up(weight.nested_absmax, compute), weight.nested_block_size)[: weight.absmax.size]
    return up(weight.nested_code, compute)[weight.absmax] * outer + up(weight.nested_offset, compute)[0]


def dequantize_range(weight: NF4Array, start: int, stop: int, absmax: np.ndarray, compute: np.dtype) -> np.ndarray:
    """Elements start..stop of the flattened weight."""
    first_byte, last_byte = start // 2, -(-stop // 2)
    levels = _BYTE_LEVELS.astype(compute, copy=False)[weight.packed.reshape(-1)[first_byte:last_byte]].reshape(-1)
    levels = levels[start - 2 * first_byte : stop - 2 * first_byte]
    first_block, last_block = start // weight.block_size, -(-stop // weight.block_size)
    scales = np.repeat(absmax[first_block:last_block], weight.block_size)
    values = levels * scales[start - first_block * weight.block_size :][: stop - start]
    if weight.value_dtype == "float32":
        return values
    return values.astype(np.float32).astype(weight.value_dtype).astype(compute)


def dequantize_rows(weight: NF4Array, rows: slice, compute: np.dtype) -> np.ndarray:
    """Some rows of the weight, [rows, in]."""
    columns = weight.shape[1]
    flat = dequantize_range(weight, rows.start * columns, rows.stop * columns, restore_absmax(weight, compute), compute)
    return flat.reshape(-1, columns)


def nf4_compute_dtype(weight: NF4Array, *arrays: np.ndarray | None) -> np.dtype:
    return compute_dtype(weight.absmax, weight.nested_absmax, *arrays)


class ReferenceNF4:
    @operator
    def nf4_quantize(self, w: np.ndarray, block_size: int = 64, *, double: bool = False) -> NF4Array:
        compute = compute_dtype(w)
        codes, absmax = _quantize_blocks(up(w, compute).reshape(-1), block_size, NF4_THRESHOLDS)
        if codes.size % 2:
            codes = np.append(codes, np.uint8(7))
        packed = (codes[0::2] << 4) | codes[1::2]
        shape = (int(w.shape[0]), int(w.shape[1]))
        if not double:
            return NF4Array(packed, absmax, shape, block_size)
        code_map = dynamic_map().astype(compute)
        offset = absmax.mean(dtype=np.float64).astype(compute).reshape(1)
        thresholds = (code_map[:-1] + code_map[1:]) / compute.type(2)
        inner, outer = _quantize_blocks(absmax - offset, NESTED_BLOCK_SIZE, thresholds)
        return NF4Array(packed, inner, shape, block_size, outer, code_map, offset, NESTED_BLOCK_SIZE)

    @operator
    def nf4_dequantize(self, w: NF4Array, dtype: Any = np.float32) -> np.ndarray:
        compute = nf4_compute_dtype(w)
        n = w.shape[0] * w.shape[1]
        flat = dequantize_range(w, 0, n, restore_absmax(w, compute), compute)
        return finish(flat.reshape(w.shape), dtype, compute)
