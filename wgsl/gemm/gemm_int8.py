"""Products of many rows with frozen weights, of both rounded to 8 bits: gemm_int8.wgsl, gemm_int8_pack.wgsl.

For cards without matrix units: dot products of four elements in one instruction, of which many do two to three times as
many a second as of multiply-adds in float32. A weight, and what it is multiplied with, is rounded along the dimension
that the product sums over, 64 elements by one scale, so that a gradient needs no loss scale.
Source: ggml's products of quantised weights with activations in Q8_1 (github.com/ggml-org/llama.cpp), in blocks of 64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.memory import Array
from wgrad.wgsl.formats.formats import weight_operand
from wgrad.wgsl.gemm.gemm import Tile, dense_operand
from wgrad.wgsl.gemm.gemm_epilogue import Epilogue, reduce_splits
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime

BLOCK = 64  # elements of one scale, as the shaders have it
LEAST_ROWS = 128  # with fewer most of a tile is empty, and rounding a weight takes as long as its product
_TILE = Tile(128, 64, BLOCK // 4, 2, 1)  # counts words of four elements along K
_PACKED_TOGETHER, _PACKING_THREADS = 32, 128  # rows or columns of a block that is rounded, and invocations
_FEW_TILES, _WANTED_TILES, _LEAST_K = 96, 192, 512  # fewer tiles than these are split over K


@dataclass(frozen=True)
class Packed:
    """A rounded operand. words: uint32 [16 ceil(K / 64), padded], scales: float32 [ceil(K / 64), padded]."""

    words: Array
    scales: Array


def served(device: Runtime, weight: FrozenWeight, rows: int) -> bool:
    """Not of stacks, which are made where matrix units are in use, nor where a rounded operand is beyond a binding."""
    if rows < LEAST_ROWS or weight.shape[1] % weight.unit or weight.parts:
        return False
    n, k = (side + BLOCK for side in weight.shape)  # as far as it may be padded
    return max(n * k, (rows + _TILE.m) * max(n, k)) <= device.max_binding_bytes


def times_weight(
    device: Runtime,
    x: Array,
    weight: FrozenWeight,
    out: Array,
    *,
    trans_b: bool,
    bias: Array | None = None,
    residual: Array | None = None,
    lowrank: tuple[Array, Array] | None = None,
) -> None:
    """out = x Wᵀ (trans_b) or x W, and what is added to it; as `gemm.product`."""
    (m, k), n = x.shape, out.shape[1]
    a = pack(device, x, _TILE.m)
    b = device.held.get(weight, (Packed, trans_b), lambda: pack(device, weight, _TILE.n, across=not trans_b))
    end = Epilogue(out, n, 0, 1.0, bias, residual, False)
    tiles = -(-m // _TILE.m) * -(-n // _TILE.n)
    splits = 1 if tiles >= _FEW_TILES else max(1, min(round(_WANTED_TILES / tiles), k // _LEAST_K))
    k_per_split = -(-k // splits // BLOCK) * BLOCK
    splits = -(-k // k_per_split)
    target = device.empty((splits, m, n)) if splits > 1 else out
    u, v = lowrank or (None, None)
    rank = 0 if u is None else u.shape[1]
    constants: dict[str, Constant] = {
        **_TILE.constants(4),
        **(Epilogue.of_parts(n) if splits > 1 else end.constants(n)),
        "TRANS_B": trans_b,
        "SPLIT": splits > 1,
        "HAS_LOWRANK": lowrank is not None,
        "PARTS": False,
        "U_T": "f32",
        "V_T": "f32",
        "GROUPED": False,
        "RESIDUAL_AHEAD": False,
    }
    device.launch(
        "gemm_int8",
        [a.words, b.words, target, bias, residual, u, v, a.scales, b.scales],
        [m, n, k, k_per_split, n, 0, rank, 0, 0, 0, 0, 0, 1.0, *(0,) * 6, rank, n, n],
        (-(-n // _TILE.n), -(-m // _TILE.m), splits),
        constants,
        work=2.0 * m * n * k,
    )
    if splits > 1:
        reduce_splits(device, target, end, (m, n, splits))


def pack(device: Runtime, s: Array | FrozenWeight, multiple: int, *, across: bool = False) -> Packed:
    """s [I, K], or [K, I] where `across`, rounded; I is padded to a multiple of `multiple`."""
    rows, columns = s.shape
    k, i = (rows, columns) if across else (columns, rows)
    blocks, padded = -(-k // BLOCK), -(-i // multiple) * multiple
    words, scales = device.empty((blocks * BLOCK // 4, padded), np.uint32), device.empty((blocks, padded))
    operand = dense_operand(s, _TILE) if isinstance(s, Array) else weight_operand(s, s.unit, table=True)
    high, wide = (BLOCK, _PACKED_TOGETHER) if across else (_PACKED_TOGETHER, BLOCK)
    constants: dict[str, Constant] = {
        **operand.constants,
        "VEC_B": columns % 4 == 0,
        "ACROSS": across,
        "BLOCK_ROWS": high,
        "BLOCK_COLUMNS": wide,
        "LOADS": high * wide // operand.unit // _PACKING_THREADS,
    }
    device.launch(
        "gemm_int8_pack",
        [None, operand.codes, words, scales, None, None, None, *operand.scales],
        [rows, columns, padded, *operand.parameters, 0, *operand.stack],
        (-(-columns // wide), -(-rows // high), 1),
        constants,
        work=float(s.nbytes + words.nbytes),
    )
    return Packed(words, scales)
