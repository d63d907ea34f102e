"""Quantization to GGUF types with the same bits as llama.cpp's llama-quantize, with or without an importance matrix.

Without one, types with one scale for a block are quantized by the `gguf` package, or by their own file in this folder.
This file has the types that search for the scales of a block. They try candidates in a fixed order, and compare
weighted sums of squared errors. Groups of elements are columns, so that NumPy adds them in the order of the elements,
in float32, as C does.

Source: ggml-quants.c, quantize_row_q4_K_ref and those of the others (github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.formats.gguf_blocks import pack
from wgrad.device.formats.iq4 import LEVELS

_Quantize = Callable[[np.ndarray, np.ndarray | None], np.ndarray]  # from rows and importance to the bytes of each block
ROUNDED = ("q4_0", "q5_0", "q8_0", "q4_k", "q6_k")  # formats to which devices round weights in training
_BLOCK = 256  # elements of a block with a scale of scales
_CHUNK = 1 << 19  # elements quantized at once: a few arrays of this size fit into a CPU cache
_LEAST = np.float32(1e-15)  # groups with smaller values become zeros
_F32 = np.float32


def quantize_rows(gguf: Any, w: np.ndarray, kind: str, importance: np.ndarray | None = None) -> np.ndarray:
    """Quantize rows for a GGUF file.

    Args:
        gguf: The package.
        w: float32 [rows, n], n a multiple of the type's block.
        kind: GGUF's name of the type.
        importance: float32 [n], weights of the columns' errors; None: all have the same.

    Returns:
        uint8 [rows, bytes of a row], or the floats of a type of numbers.
    """
    quantize = _SEARCHED.get(kind) or (_WEIGHTED.get(kind) if importance is not None else None)
    if quantize is None:
        found: np.ndarray = gguf.quantize(w, gguf.GGMLQuantizationType[kind])
        return found
    return _in_chunks(quantize, w, importance)


def rounded(kind: type[FrozenWeight], w: np.ndarray) -> FrozenWeight:
    """Quantize to a format in `ROUNDED` with the values of `quantize_rows`, without importance and the package."""
    quantize = _SEARCHED.get(kind.gguf_type)
    if quantize is None:
        return kind.quantize(w)
    return kind.from_gguf(_in_chunks(quantize, w, None), (w.shape[0], w.shape[1]))


def _in_chunks(quantize: _Quantize, w: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    step = max(_CHUNK // w.shape[1], 1)
    with np.errstate(all="ignore"):  # the caller reports values that are not finite, and scales beyond float16
        parts = [quantize(w[at : at + step].astype(np.float32), importance) for at in range(0, len(w), step)]
    return np.concatenate(parts).reshape(len(w), -1)


def _groups(blocks: np.ndarray, size: int) -> np.ndarray:
    """Return groups of `size` elements as columns: [size, groups]."""
    return np.ascontiguousarray(blocks.reshape(-1, size).T)


def _in_order(values: np.ndarray) -> np.ndarray:
    """Return the sum of each column, added from the first element to the last, as NumPy adds rows."""
    total: np.ndarray = np.add.reduce(values, axis=0, dtype=np.float32)
    return total


def _weighted(
    rows: np.ndarray, importance: np.ndarray, size: int, spread: int, factor: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return groups of `size` elements as columns, and the weights of their errors.

    A weight is importance * sqrt(x^2 + factor * m), with m the mean square of the `spread` elements around x.
    """
    x, among = _groups(rows, size), _groups(rows, spread)
    mean = np.repeat(_F32(factor) * _in_order(among * among) / _F32(spread), spread // size)
    return x, _groups(np.broadcast_to(importance, rows.shape), size) * np.sqrt(mean + x * x)


# ---- a scale and a minimum for 32 elements: Q4_K, Q5_K; with an importance matrix Q4_1, Q5_1, too --------------
def _scale_and_minimum(
    x: np.ndarray, weights: np.ndarray, most: int, first: float, step: float, steps: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return scale and minimum of each column, and its codes from 0 to `most`.

    Candidates map the range of a column to most + first + step * n, for n from 0 to `steps`.
    """
    least, high = np.minimum(x.min(axis=0), _F32(0)), x.max(axis=0)
    sum_w, sum_x = _in_order(weights), _in_order(weights * x)
    zero = high == least
    scale = 1 / (_F32(most) / (high - least))

    def codes_of(reach: np.float32) -> np.ndarray:
        codes: np.ndarray = np.clip(np.rint(reach / (high - least) * (x - least)), _F32(0), _F32(most))
        return codes

    def error(codes: np.ndarray, scale: np.ndarray, least: np.ndarray) -> np.ndarray:
        difference = scale * codes + least - x
        return _in_order(weights * (difference * difference))

    chosen = codes_of(_F32(most))
    best = error(chosen, scale, least)
    for number in range(steps + 1):  # each candidate starts from the best minimum so far
        codes = codes_of(_F32(first) + _F32(step) * _F32(number) + _F32(most))
        weighted = weights * codes
        sum_l, sum_l2, sum_xl = _in_order(weighted), _in_order(weighted * codes), _in_order(weighted * x)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        new_least = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        above = new_least > 0
        new_scale, new_least = np.where(above, sum_xl / sum_l2, new_scale), np.where(above, _F32(0), new_least)
        found = error(codes, new_scale, new_least)
        better = (determinant > 0) & (found < best)
        best = np.where(better, found, best)
        scale, least = np.where(better, new_scale, scale), np.where(better, new_least, least)
        chosen = np.where(better, codes, chosen)
    return np.where(zero, _F32(0), scale), -least, np.where(zero, _F32(0), chosen)


_IMPORTANT = (-0.9, 0.05, 36)  # first, step and steps of `_scale_and_minimum` with an importance matrix


def _of_block(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a scale for each eight values [blocks, 8], and the values as multiples of it, 0 to 63."""
    largest = values.max(axis=1, keepdims=True).clip(_F32(0))
    inverse = np.where(largest > 0, _F32(63) / largest, _F32(0))
    return largest / _F32(63), np.minimum(np.rint(inverse * values).astype(np.uint8), 63)


def _fitted_of_block(values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what `_of_block` returns, but with less weighted error: try several ranges, then change each multiple.

    Multiples below 0 wrap around like C's bytes, also where llama.cpp reads them again.
    """
    x, w, most = _groups(values, 8), _groups(weights, 8), _F32(63)
    largest = x.max(axis=0).clip(_F32(0))

    def error(inverse: np.ndarray, codes: np.ndarray) -> np.ndarray:
        difference = x - 1 / inverse * codes
        return _in_order(w * difference * difference)

    inverse = most / largest
    best = error(inverse, _as_bytes(np.rint(inverse * x)))
    for number in (n for n in range(-4, 5) if n):
        reach = _F32(0.1) * _F32(number) + most
        found = error(reach / largest, np.minimum(np.rint(reach / largest * x), most))
        inverse, best = np.where(found < best, reach / largest, inverse), np.minimum(best, found)
    codes = np.minimum(np.rint(inverse * x), most)
    sum_lx, sum_l2 = _in_order(w * x * codes), _in_order(w * codes * codes)
    codes = _as_bytes(codes)
    for _ in range(5):
        for code, xi, wi in zip(codes, x, w):
            without_lx, without_l2 = sum_lx - wi * xi * code, sum_l2 - wi * code * code
            other = np.minimum(np.rint(xi * without_l2 / without_lx), most)
            other_lx, other_l2 = without_lx + wi * xi * other, without_l2 + wi * other * other
            better = (without_lx > 0) & (without_l2 > 0) & (other != code)
            better &= other_lx * other_lx * sum_l2 > sum_lx * sum_lx * other_l2
            code[better] = _as_bytes(other[better])
            sum_lx, sum_l2 = np.where(better, other_lx, sum_lx), np.where(better, other_l2, sum_l2)
    none = largest < _LEAST
    scale = np.where(none | ~(sum_l2 > 0), _F32(0), sum_lx / sum_l2)
    return scale[:, None], np.where(none, _F32(0), codes).T.astype(np.uint8)


def _as_bytes(codes: np.ndarray) -> np.ndarray:
    wrapped: np.ndarray = np.where(codes < 0, codes + _F32(256), codes)
    return wrapped


def _q45_k(
    rows: np.ndarray, importance: np.ndarray | None, most: int, first: float, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the 16 bytes that precede a block's codes, and the codes [blocks, 8, 32]."""
    if importance is None:
        x = _groups(rows, 32)
        weights = np.sqrt(_in_order(x * x) / _F32(32)) + np.abs(x)
        scales, minima, found = _scale_and_minimum(x, weights, most, first, 0.1, steps)
        of_blocks = [_of_block(values.reshape(-1, 8)) for values in (scales, minima)]
    else:
        x, weights = _weighted(rows, importance, 32, _BLOCK, 2)
        scales, minima, found = _scale_and_minimum(x, weights, most, *_IMPORTANT)
        sums = _in_order(weights).reshape(-1, 8)
        of_blocks = [_fitted_of_block(values.reshape(-1, 8), sums) for values in (scales, minima)]
    heads, fields = [head.astype(np.float16) for head, _ in of_blocks], [field for _, field in of_blocks]
    blocks = rows.reshape(-1, _BLOCK)
    d, dmin = (head.astype(np.float32) * field for head, field in zip(heads, fields))
    scaled = (blocks.reshape(-1, 8, 32) + dmin[..., None]) / d[..., None]
    codes = np.where(d[..., None] == 0, found.T.reshape(-1, 8, 32), np.rint(scaled).clip(0, most)).astype(np.uint8)
    sc, m = fields
    packed = np.concatenate(
        [
            sc[:, :4] | sc[:, 4:] >> 4 << 6,
            m[:, :4] | m[:, 4:] >> 4 << 6,
            sc[:, 4:] & 15 | (m[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    return np.concatenate([*(head.view(np.uint8) for head in heads), packed], axis=1), codes


def _low_nibbles(codes: np.ndarray) -> np.ndarray:
    """Pack codes [blocks, groups, 32] into bytes of two groups each, the first in the low bits."""
    low = codes & 15
    return (low[:, ::2] | low[:, 1::2] << 4).reshape(len(codes), -1)


def _q4_k(rows: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    head, codes = _q45_k(rows, importance, 15, -1.0, 20)
    return np.concatenate([head, _low_nibbles(codes)], axis=1)


def _q5_k(rows: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    head, codes = _q45_k(rows, importance, 31, -0.5, 15)
    fifth = np.bitwise_or.reduce((codes >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    return np.concatenate([head, fifth, _low_nibbles(codes)], axis=1)


def _q45_1(rows: np.ndarray, importance: np.ndarray | None, most: int) -> np.ndarray:
    assert importance is not None
    x, weights = _weighted(rows, importance, 32, rows.shape[1], 1)
    scales, minima, codes = _scale_and_minimum(x, weights, most, *_IMPORTANT)
    heads = [head.astype(np.float16)[:, None].view(np.uint8) for head in (scales, -minima)]
    return np.concatenate([*heads, *_with_fifth_bits(codes, most)], axis=1)


def _with_fifth_bits(codes: np.ndarray, most: int) -> list[np.ndarray]:
    """Pack codes [32, groups]: the bytes of their fifth bits, if they have any, and of the low four bits."""
    whole = codes.T.astype(np.uint8)
    fifth = [np.packbits(whole >> 4, axis=1, bitorder="little")] if most > 15 else []
    return [*fifth, _halves(whole & 15)]


# ---- a scale for 16 elements of both signs: Q6_K; with an importance matrix for 32: Q4_0, Q5_0 -----------------
def _largest(x: np.ndarray) -> np.ndarray:
    """Return the element with the largest magnitude of each column (the first of equal ones)."""
    found: np.ndarray = np.take_along_axis(x, np.abs(x).argmax(axis=0)[None], axis=0)[0]
    return found


def _signed_scale(x: np.ndarray, weights: np.ndarray, half: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the scale of each column for codes from -half to half - 1, and the codes."""
    largest = _largest(x)

    def tried(reach: np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        codes = np.rint(-reach / largest * x).clip(_F32(-half), _F32(half - 1))
        return codes, _in_order(weights * x * codes), _in_order(weights * codes * codes)

    chosen, sum_lx, sum_l2 = tried(_F32(half))
    scale = np.where(sum_l2 != 0, sum_lx / sum_l2, _F32(0))
    best = scale * sum_lx
    for step in (n for n in range(-9, 10) if n):
        codes, sum_lx, sum_l2 = tried(_F32(half) + _F32(0.1) * _F32(step))
        better = (sum_l2 > 0) & (sum_lx * sum_lx > best * sum_l2)
        scale = np.where(better, sum_lx / sum_l2, scale)
        best = np.where(better, scale * sum_lx, best)
        chosen = np.where(better, codes, chosen)
    zero = np.abs(largest) < _LEAST
    return np.where(zero, _F32(0), scale), np.where(zero, _F32(-half), chosen)


def _q45_0(rows: np.ndarray, importance: np.ndarray | None, half: int) -> np.ndarray:
    assert importance is not None
    scales, codes = _signed_scale(*_weighted(rows, importance, 32, rows.shape[1], 1), half)
    head = scales.astype(np.float16)[:, None].view(np.uint8)
    return np.concatenate([head, *_with_fifth_bits(codes + half, 2 * half - 1)], axis=1)


def _q6_k(rows: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    x, blocks = _groups(rows, 16), rows.reshape(-1, _BLOCK)
    weights = x * x if importance is None else _groups(np.broadcast_to(importance, rows.shape), 16)
    scales, codes = _signed_scale(x, weights, 32)
    scales, codes = scales.reshape(-1, 16), codes.T.reshape(-1, 16, 16)
    top = np.take_along_axis(scales, np.abs(scales).argmax(axis=1)[:, None], axis=1)
    inverse = _F32(-128) / top
    d = (1 / inverse).astype(np.float16)
    fields = np.minimum(np.rint(inverse * scales), _F32(127))
    size = (d.astype(np.float32) * fields)[..., None]
    codes = np.where(size == 0, codes, np.rint(blocks.reshape(codes.shape) / size).clip(-32, 31)) + 32
    quarters = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = quarters[:, :, :2] & 15 | (quarters[:, :, 2:] & 15) << 4
    high = np.bitwise_or.reduce((quarters >> 4) << np.arange(0, 8, 2, dtype=np.uint8)[:, None], axis=2)
    parts = [low.reshape(-1, 128), high.reshape(-1, 64), fields.astype(np.int8).view(np.uint8), d.view(np.uint8)]
    made = np.concatenate(parts, axis=1)
    made[np.abs(top[:, 0]) < _LEAST] = 0
    return made


# ---- levels: IQ4_NL, IQ4_XS --------------------------------------------------------------------------------------
# The code of the level nearest to x, or of the higher of two, at index floor(2 * x) + 256. Midpoints between levels are
# multiples of 1/2, so the index decides.
_NEAREST = np.searchsorted((LEVELS[1:] + LEVELS[:-1]) / 2, np.arange(-256, 256) / 2, side="right").astype(np.uint8)


def _levels_of(x: np.ndarray) -> np.ndarray:
    """Return the code of the level nearest to each value; any code for NaN."""
    place = np.fmin(np.fmax(np.floor(x + x), _F32(-256)), _F32(255)).astype(np.int16) + 256
    codes: np.ndarray = _NEAREST[place]
    return codes


def _level_scale(rows: np.ndarray, importance: np.ndarray | None, spread: int) -> np.ndarray:
    """Return the scale of each group of 32 elements. spread: as in `_weighted`."""
    if importance is None:
        x = _groups(rows, 32)
        weights = x * x
    else:
        x, weights = _weighted(rows, importance, 32, spread, 2)
    largest = _largest(x)

    def tried(inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        q = LEVELS[_levels_of(inverse * x)]
        weighted = weights * q
        return _in_order(weighted * x), _in_order(weighted * q)

    sum_qx, sum_q2 = tried(1 / (-largest / LEVELS[0]))
    scale = sum_qx / sum_q2
    best = scale * sum_qx
    for step in range(-7, 8):
        sum_qx, sum_q2 = tried((_F32(step) + LEVELS[0]) / largest)
        better = (sum_q2 > 0) & (sum_qx * sum_qx > best * sum_q2)
        scale = np.where(better, sum_qx / sum_q2, scale)
        best = np.where(better, scale * sum_qx, best)
    return np.where(np.abs(largest) < _LEAST, _F32(0), scale)


def _inverse(scales: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.where(scales != 0, 1 / scales, _F32(0))
    return found


def _halves(codes: np.ndarray) -> np.ndarray:
    """Pack codes [groups, 32] into bytes of an element and the one 16 after it."""
    pairs: np.ndarray = codes[:, :16] | codes[:, 16:] << 4
    return pairs


def _iq4_nl(rows: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    scales = _level_scale(rows, importance, 32)[:, None]
    codes = _levels_of(_inverse(scales) * rows.reshape(-1, 32))
    return np.concatenate([scales.astype(np.float16).view(np.uint8), _halves(codes)], axis=1)


def _iq4_xs(rows: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    scales = _level_scale(rows, importance, _BLOCK).reshape(-1, 8)
    top = np.take_along_axis(scales, np.abs(scales).argmax(axis=1)[:, None], axis=1)
    d = -top / _F32(32)
    whole = np.rint(_inverse(d) * scales).clip(-32, 31)
    codes = _levels_of(_inverse(d * whole)[..., None] * rows.reshape(-1, 8, 32))
    fields = (whole + 32).astype(np.uint8)
    high = pack(fields >> 4, 2).reshape(-1, 2)
    low = pack(fields & 15, 4).reshape(-1, 4)
    parts = [d.astype(np.float16).view(np.uint8), high, low, _halves(codes.reshape(-1, 32)).reshape(-1, 128)]
    return np.concatenate(parts, axis=1)


_SEARCHED: dict[str, _Quantize] = {
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
# Only with an importance matrix. Without one, the largest element sets the scale of these types.
_WEIGHTED: dict[str, _Quantize] = {
    "Q4_0": partial(_q45_0, half=8),
    "Q4_1": partial(_q45_1, most=15),
    "Q5_0": partial(_q45_0, half=16),
    "Q5_1": partial(_q45_1, most=31),
}
