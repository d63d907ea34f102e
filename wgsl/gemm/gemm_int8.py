"""GEMM of many rows with a frozen weight, both rounded to 8 bits: gemm_int8.wgsl, gemm_int8_pack.wgsl.

For GPUs without tensor cores: one instruction computes a dot product of four elements, and many GPUs do two to three
times as many of these per second as float32 multiply-adds. Both operands are rounded along the inner dimension, in
blocks of 64 with one scale, so that a gradient needs no loss scale.
Source: ggml's matmuls of quantized weights with activations in Q8_1 (github.com/ggml-org/llama.cpp), in blocks of 64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.memory import Array
from wgrad.wgsl.formats.formats import WeightForm, dense_operand, weight_operand
from wgrad.wgsl.gemm.gemm_epilogue import Epilogue, reduce_splits
from wgrad.wgsl.gemm.gemm_tile import Tile
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.dispatch_parts import launch_tiles
from wgrad.wgsl.runtime.runtime import Runtime

BLOCK = 64  # elements of one scale, as the shaders have it
LEAST_ROWS = 128  # with fewer, most of a tile is empty, and rounding the weight takes as long as the GEMM
TILE = Tile(128, 64, BLOCK // 4, 2, 1)  # k in words of four elements
_PACKED_TOGETHER, _PACKING_THREADS = 32, 128  # rows or columns rounded by a workgroup, and its invocations
_FEW_TILES, _WANTED_TILES, _LEAST_K = 96, 192, 512  # fewer tiles than these are split over K


@dataclass(frozen=True)
class Packed:
    """A rounded operand. words: uint32 [16 ceil(K / 64), padded], scales: float32 [ceil(K / 64), padded]."""

    words: Array
    scales: Array


def served(weight: WeightForm, rows: int, max_binding_bytes: int) -> bool:
    """Return whether it serves a GEMM: not stacks (tensor cores only), nor rounded operands larger than a binding."""
    if rows < LEAST_ROWS or weight.shape[1] % weight.unit or weight.stacked:
        return False
    n, k = (side + BLOCK for side in weight.shape)  # as far as it may be padded
    return max(n * k, (rows + TILE.m) * max(n, k)) <= max_binding_bytes


def splits_of(mnk: tuple[int, int, int]) -> tuple[int, int]:
    """Number of splits of K, and the K of each."""
    m, n, k = mnk
    tiles = -(-m // TILE.m) * -(-n // TILE.n)
    splits = 1 if tiles >= _FEW_TILES else max(1, min(round(_WANTED_TILES / tiles), k // _LEAST_K))
    k_per_split = -(-k // splits // BLOCK) * BLOCK
    return -(-k // k_per_split), k_per_split


def launch(
    device: Runtime,
    splits: int,
    k_per_split: int,
    x: Array,
    weight: FrozenWeight,
    end: Epilogue,
    *,
    trans_b: bool,
) -> None:
    """end.out = x Wᵀ (trans_b) or x W, and the epilogue `end`. splits, k_per_split: from `splits_of`."""
    (m, k), n = x.shape, end.out.shape[1]
    a = pack(device, x, TILE.m)
    b = device.dequantized.get(weight, (Packed, trans_b), lambda: pack(device, weight, TILE.n, across=not trans_b))
    target = device.empty((splits, m, n)) if splits > 1 else end.out
    u, v = end.lowrank or (None, None)
    rank = 0 if u is None else u.shape[1]
    constants: dict[str, Constant] = {
        **TILE.constants(4),
        **(Epilogue.of_parts(n) if splits > 1 else end.constants(n)),
        "TRANS_B": trans_b,
        "SPLIT": splits > 1,
        "HAS_LOWRANK": end.lowrank is not None,
        "PARTS": False,
        "U_T": "f32",
        "V_T": "f32",
        "GROUPED": False,
        "EXPERTS": False,
        "RESIDUAL_AHEAD": False,
    }
    launch_tiles(
        device,
        "gemm_int8",
        [a.words, b.words, target, end.bias, end.residual, u, v, a.scales, b.scales],
        [m, n, k, k_per_split, n, 0, rank, 0, 0, 0, 0, 0, 1.0, *(0,) * 6, rank, n, n],
        (-(-n // TILE.n), -(-m // TILE.m), splits),
        constants,
        work=2.0 * m * n * k,
    )
    if splits > 1:
        reduce_splits(device, target, end, (m, n, splits))


def pack(device: Runtime, s: Array | FrozenWeight, multiple: int, *, across: bool = False) -> Packed:
    """Round s [I, K], or [K, I] where `across`; I is padded to a multiple of `multiple`."""
    rows, columns = s.shape
    k, i = (rows, columns) if across else (columns, rows)
    blocks, padded = -(-k // BLOCK), -(-i // multiple) * multiple
    words, scales = device.empty((blocks * BLOCK // 4, padded), np.uint32), device.empty((blocks, padded))
    operand = dense_operand(s, 4) if isinstance(s, Array) else weight_operand(s, s.unit, table=True)
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
