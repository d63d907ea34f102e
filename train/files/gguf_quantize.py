"""Weights in the types of GGUF as llama.cpp's llama-quantize makes them, bit for bit, without an importance matrix.

Types with one scale for a block are quantised by the `gguf` package. Here are those that search for the scales of a
block: candidates in a fixed order, each judged by a weighted sum of squared errors. Groups of elements are columns, so
that sums over them add up in the order of the elements, in float32, as in C.
Source: ggml-quants.c, quantize_row_q4_K_ref and those of the others (github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from wgrad.device.formats.gguf_blocks import pack
from wgrad.device.formats.iq4 import LEVELS

_BLOCK = 256  # elements that share a scale of scales
_CHUNK = 1 << 19  # elements that are quantised at once: a few of their size fit into a processor's cache
_LEAST = np.float32(1e-15)  # smaller groups are zeros
_F32 = np.float32


def quantize_rows(gguf: Any, w: np.ndarray, kind: str) -> np.ndarray:
    """Rows as a file has them. gguf: the package.

    Args:
        w: float32 [rows, n], n a multiple of the type's block.

    Returns:
        uint8 [rows, bytes of a row], or the floats of a type of numbers.
    """
    if kind not in _SEARCHED:
        found: np.ndarray = gguf.quantize(w, gguf.GGMLQuantizationType[kind])
        return found
    size = 32 if kind == "IQ4_NL" else _BLOCK
    blocks = w.astype(np.float32).reshape(-1, size)
    step = _CHUNK // size
    with np.errstate(all="ignore"):  # values that are not finite, and scales beyond float16, are told by the caller
        parts = [_SEARCHED[kind](blocks[at : at + step]) for at in range(0, len(blocks), step)]
    return np.concatenate(parts).reshape(len(w), -1)


def _groups(blocks: np.ndarray, size: int) -> np.ndarray:
    """[size, groups]: each group of so many elements is a column."""
    return np.ascontiguousarray(blocks.reshape(-1, size).T)


def _in_order(values: np.ndarray) -> np.ndarray:
    """The sum of each column, from the first element to the last: NumPy adds rows one after another."""
    total: np.ndarray = np.add.reduce(values, axis=0, dtype=np.float32)
    return total


# ---- a scale and a minimum for 32 elements: Q4_K, Q5_K ---------------------------------------------------------
def _scale_and_minimum(x: np.ndarray, most: int, first: float, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scale and minimum of each column, and its codes 0 to `most`. first: of the candidates' ranges, next to `most`."""
    weights = np.sqrt(_in_order(x * x) / _F32(32)) + np.abs(x)
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
    for step in range(steps + 1):  # each from the minimum of the best so far
        codes = codes_of(_F32(first) + _F32(0.1) * _F32(step) + _F32(most))
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


def _q45_k(blocks: np.ndarray, most: int, first: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The 16 bytes in front of a block's codes, and the codes [blocks, 8, 32]."""
    x = _groups(blocks, 32)
    scales, minima, found = _scale_and_minimum(x, most, first, steps)
    heads, fields = [], []
    for values in (scales.reshape(-1, 8), minima.reshape(-1, 8)):
        largest = values.max(axis=1, keepdims=True).clip(_F32(0))
        inverse = np.where(largest > 0, _F32(63) / largest, _F32(0))
        fields.append(np.minimum(np.rint(inverse * values).astype(np.uint8), 63))
        heads.append((largest / _F32(63)).astype(np.float16))
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
    """Codes [blocks, groups of 32, 32] -> bytes of two groups each, the first in the low bits."""
    low = codes & 15
    return (low[:, ::2] | low[:, 1::2] << 4).reshape(len(codes), -1)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    head, codes = _q45_k(blocks, 15, -1.0, 20)
    return np.concatenate([head, _low_nibbles(codes)], axis=1)


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    head, codes = _q45_k(blocks, 31, -0.5, 15)
    fifth = np.bitwise_or.reduce((codes >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    return np.concatenate([head, fifth, _low_nibbles(codes)], axis=1)


# ---- a scale for 16 elements of both signs: Q6_K ---------------------------------------------------------------
def _largest(x: np.ndarray) -> np.ndarray:
    """The first of the largest elements of each column, with its sign."""
    found: np.ndarray = np.take_along_axis(x, np.abs(x).argmax(axis=0)[None], axis=0)[0]
    return found


def _signed_scale(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scale of each column for codes -32 to 31, and the codes."""
    largest = _largest(x)
    weights = x * x

    def tried(reach: np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        codes = np.rint(-reach / largest * x).clip(_F32(-32), _F32(31))
        return codes, _in_order(weights * x * codes), _in_order(weights * codes * codes)

    chosen, sum_lx, sum_l2 = tried(_F32(32))
    scale = np.where(sum_l2 != 0, sum_lx / sum_l2, _F32(0))
    best = scale * sum_lx
    for step in (n for n in range(-9, 10) if n):
        codes, sum_lx, sum_l2 = tried(_F32(32) + _F32(0.1) * _F32(step))
        better = (sum_l2 > 0) & (sum_lx * sum_lx > best * sum_l2)
        scale = np.where(better, sum_lx / sum_l2, scale)
        best = np.where(better, scale * sum_lx, best)
        chosen = np.where(better, codes, chosen)
    zero = np.abs(largest) < _LEAST
    return np.where(zero, _F32(0), scale), np.where(zero, _F32(-32), chosen)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    scales, codes = _signed_scale(_groups(blocks, 16))
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
# The code of the nearest level, of two the higher, by twice a number rounded down, from -256 on: what is halfway
# between two levels is a multiple of a half.
_NEAREST = np.searchsorted((LEVELS[1:] + LEVELS[:-1]) / 2, np.arange(-256, 256) / 2, side="right").astype(np.uint8)


def _levels_of(x: np.ndarray) -> np.ndarray:
    """The code of each; of what is no number any."""
    place = np.fmin(np.fmax(np.floor(x + x), _F32(-256)), _F32(255)).astype(np.int16) + 256
    codes: np.ndarray = _NEAREST[place]
    return codes


def _level_scale(x: np.ndarray) -> np.ndarray:
    """The scale of each column of 32 elements."""
    largest, weights = _largest(x), x * x

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
    """Codes [groups, 32] -> bytes of an element and the one 16 after it."""
    pairs: np.ndarray = codes[:, :16] | codes[:, 16:] << 4
    return pairs


def _iq4_nl(blocks: np.ndarray) -> np.ndarray:
    scales = _level_scale(_groups(blocks, 32))[:, None]
    codes = _levels_of(_inverse(scales) * blocks)
    return np.concatenate([scales.astype(np.float16).view(np.uint8), _halves(codes)], axis=1)


def _iq4_xs(blocks: np.ndarray) -> np.ndarray:
    scales = _level_scale(_groups(blocks, 32)).reshape(-1, 8)
    top = np.take_along_axis(scales, np.abs(scales).argmax(axis=1)[:, None], axis=1)
    d = -top / _F32(32)
    whole = np.rint(_inverse(d) * scales).clip(-32, 31)
    codes = _levels_of(_inverse(d * whole)[..., None] * blocks.reshape(-1, 8, 32))
    fields = (whole + 32).astype(np.uint8)
    high = pack(fields >> 4, 2).reshape(-1, 2)
    low = pack(fields & 15, 4).reshape(-1, 4)
    parts = [d.astype(np.float16).view(np.uint8), high, low, _halves(codes.reshape(-1, 32)).reshape(-1, 128)]
    return np.concatenate(parts, axis=1)


_SEARCHED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
