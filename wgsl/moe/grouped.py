"""GEMMs of experts: rows, grouped by expert, with their weights. Shaders: gemm*.wgsl, moe_weight_grad.wgsl."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.memory import Array
from wgrad.wgsl.formats.formats import BLOCK, KINDS, WeightForm, widest_unit
from wgrad.wgsl.formats.quantize import decode
from wgrad.wgsl.gemm import gemm_matrix, gemm_matrix_skinny, gemv
from wgrad.wgsl.gemm.dequantized import Form, dequantized
from wgrad.wgsl.gemm.gemm import Experts, launch
from wgrad.wgsl.gemm.gemm_epilogue import Epilogue, reduce_splits
from wgrad.wgsl.gemm.gemm_matrix import MatrixTile
from wgrad.wgsl.gemm.gemm_matrix_skinny import launch_gradients, launch_rows
from wgrad.wgsl.gemm.gemm_tile import FEW_REGISTERS, FLAT_SKINNY, MAIN, SMALL, TALL_SKINNY, Tile
from wgrad.wgsl.gemm.gemv import VectorTile
from wgrad.wgsl.gemm.plan import Gemm, Limits, Plan, form_of, on_tensor_cores
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.dispatch_parts import launch_tiles
from wgrad.wgsl.runtime.runtime import Runtime

# Mean rows of an expert at which the choice of tile changes. An expert's last tile is half empty on average: with as
# many rows as a tile has, that costs an H100 a third of its rate.
_FEW_ROWS, _MANY_ROWS, _MOST_ROWS = 16, 48, 256
_FLAT = Tile(64, 128, 16, 2, 2)
# On tensor cores, with code of fewer rows for the last tile (bench/notes/experts.md). Not measured, and not used, with
# a short K, such as a LoRA's.
_HIGH_ROWS, _HIGH_ROWS_OF_ARRAYS, _LEAST_K = 96, 64, 128
_OF_ARRAYS = replace(gemm_matrix.LARGE, shorter=(2,))
# Tiles up to so many rows on average: 0.57 to 0.79 of the time of other tiles on an H100 with NF4, 0.71 to 1.03 with
# MXFP4. Arrays, forward: 0.82 to 0.92. Subgroups of 64 were not timed.
_FEWER = (
    (30, gemm_matrix.FEW_ROWS_TILES[0]),
    (52, gemm_matrix.FEW_ROWS_TILES[1]),
    (_HIGH_ROWS, replace(gemm_matrix.FEW_ROWS_TILES[2], shorter=(2,))),
)
_FEWER_OF_ARRAYS = replace(gemm_matrix.FEW_ROWS_OF_ARRAYS, shorter=(2,))
# In the forward, a weight is decoded once for up to 288 rows. With fewer rows, each row of codes is read 64 elements
# at a time.
_FORWARD = MatrixTile(4, 2, 4, 4, 1, ahead=True, shorter=(1, 2), taller=2)  # 256 x 128
_FORWARD_FEWER, _FEWER_ROWS = MatrixTile(2, 4, 4, 2, 1, 64, ahead=True, shorter=(2,)), 192
# In the forward, with so few rows on average, each row reads its expert's weight by itself in gemv.wgsl: one token of
# any model, or a few of a model with many experts. It takes 0.14 to 0.85 of the time on an H100
# (bench/notes/experts.md); GPUs without tensor cores were not timed. With more tokens it can lose, because several may
# choose the same experts.
_ONE_BY_ONE = 0.25
_VECTOR_THREADS, _VECTOR_LANES, _VECTOR_LANES_OF_ARRAYS = 128, 16, 32
_DEQUANTIZE_ROWS = 512  # on tensor cores, with more rows, a weight is dequantized once, before its GEMM
# With 120 to 183 rows, one tile holds all rows of most experts, so that the weight is decoded once for them. On an H100
# it takes 0.79 to 0.98 of the time of the others, with 112 rows 1.00 to 1.15. Other subgroups were not timed.
_WHOLE = MatrixTile(3, 4, 4, 3, 1, ahead=True, shorter=(2, 3))  # 192 x 192
_WHOLE_ROWS = range(120, 184)
# One of two workgroups decodes while the other multiplies. In the forward, two do not fit into workgroup memory.
_BACKWARD = replace(gemm_matrix.OF_HEADS, shorter=(2,))
# Where experts have about as many rows as a tile, or a few tiles, half of them have a few more, for which a tile would
# read the weight again. These tiles take the few rows, too, and read one tile ahead, as that leaves few registers. With
# 128, 256 and 512 rows on an H100 they take 0.84 to 0.98 of the time of the others (bench/notes/experts.md). Subgroups
# of 64 were not timed.
_ABOUT, _ABOUT_MOST = 8, 512  # rows from a multiple of a tile's; rows
_ARRAYS_ABOUT_FORWARD = replace(_FORWARD_FEWER, taller=1)  # about as many rows as one tile of 128 x 128
_ARRAYS_ABOUT_BACKWARD = replace(_OF_ARRAYS, ahead=False, taller=2)
_WEIGHTS_ABOUT = replace(_FORWARD, ahead=False, decode_first=True)
_WHOLE_ABOUT = replace(_ARRAYS_ABOUT_BACKWARD, decode_first=True)  # about as many rows as one tile, no nested scales
# Of the weight gradient without tensor cores: rows of an expert are shared out until there are so many workgroups.
_WANTED_GROUPS, _MOST_SHARES, _ROWS_OF_SHARE = 256, 16, 128


@implements("grouped_linear")
def grouped_linear(
    device: Runtime,
    x: Array,
    weight: Array | FrozenWeight,
    start: Array,
    order: Array | None,
    alpha: float,
    add: Array | None,
    dtype: np.dtype,
) -> Array:
    rows = x.shape[0] if order is None else order.size
    n = weight.shape[0] // (start.size - 1) if isinstance(weight, FrozenWeight) else weight.shape[1]
    out = device.empty((rows, n), dtype)
    _grouped(device, x, weight, start, order, Epilogue(out, alpha, residual=add), trans_b=True)
    return out


@implements("grouped_linear_backward")
def grouped_linear_backward(
    device: Runtime, dy: Array, weight: Array | FrozenWeight, start: Array, alpha: float, dtype: np.dtype
) -> Array:
    out = device.empty((dy.shape[0], weight.shape[-1]), dtype)
    _grouped(device, dy, weight, start, None, Epilogue(out, alpha), trans_b=False)
    return out


def _grouped(
    device: Runtime,
    a: Array,
    weight: Array | FrozenWeight,
    start: Array,
    order: Array | None,
    end: Epilogue,
    *,
    trans_b: bool,
) -> None:
    if isinstance(weight, FrozenWeight) and weight.shape[1] % weight.unit:
        weight = decode(device, weight, np.dtype(np.float32))  # a row would start inside a unit of codes
    experts = Experts(start, order, 1 if order is None else order.size // a.shape[0])
    (rows, n), k = end.out.shape, a.shape[1]
    if isinstance(weight, Array) and end.is_plain and end.out.dtype == np.float32 and rows > _FEW_ROWS * experts.count:
        narrow = gemm_matrix_skinny.expert_tile(device, a, weight, along_rows=False, rank_inner=not trans_b)
        if narrow is not None:
            launch_rows(device, narrow, a, weight, end.out, start, order, end.alpha, rank_inner=not trans_b)
            return
    gemm = Gemm((rows, n, k), a.dtype_name, form_of(weight), end.out.dtype_name, trans_b=trans_b)
    limits = Limits.of(device)
    if isinstance(weight, FrozenWeight) and (form := dequantized_first(gemm, experts.count, limits)):
        weight = dequantized(device, weight, form)
        gemm = replace(gemm, b="float16", in_blocks=form[1])
    launch(device, plan_experts(gemm, experts.count, limits), a, weight, end, experts)


def dequantized_first(gemm: Gemm, experts: int, limits: Limits) -> Form | None:
    """Return the form to which the weight is dequantized before its GEMM; None: it is decoded inside."""
    rows, n, k = gemm.mnk
    fits = 2 * experts * n * k <= limits.max_binding_bytes
    large = rows > _DEQUANTIZE_ROWS * experts and min(n, k) >= _LEAST_K and fits
    if not large or not on_tensor_cores(gemm, limits):
        return None
    return np.dtype(np.float16), n % BLOCK == 0 and k % BLOCK == 0


def plan_experts(gemm: Gemm, experts: int, limits: Limits) -> Plan:
    """Choose the kernel of a grouped GEMM; its rows are those of all experts."""
    (_, n, k), b, mean = gemm.mnk, gemm.b, gemm.mnk[0] / experts
    if mean <= _ONE_BY_ONE and gemm.trans_b and limits.tensor_cores:
        return _one_by_one(gemm)
    if on_tensor_cores(gemm, limits):
        tile = _matrix_tile(gemm, mean, limits)
        unit = 8 if isinstance(b, str) else _unit_of(b, tile, limits.lanes)
        return Plan(gemm, "gemm_matrix", tile.for_lanes(limits.lanes, unit), 1, k, unit, table=tile.scales_inside)
    return Plan(gemm, "gemm", choose_tile(mean, n, limits.few_registers), 1, k, 4 if isinstance(b, str) else b.unit)


def _one_by_one(gemm: Gemm) -> Plan:
    """The GEMM in workgroups of one row of A each."""
    k, b = gemm.mnk[2], gemm.b
    unit, lanes = (4, _VECTOR_LANES_OF_ARRAYS) if isinstance(b, str) else (gemv.unit_of(b, 1), _VECTOR_LANES)
    while lanes > 1 and lanes >= 2 * -(-k // unit):
        lanes //= 2
    factored = not isinstance(b, str) and lanes > 1 and gemv.factored(b.rounded, 1)
    tile = VectorTile(_VECTOR_THREADS, lanes, m=1)
    return Plan(gemm, "gemv", tile, 1, k, unit, table=True, factored=factored)


def _matrix_tile(gemm: Gemm, mean: float, limits: Limits) -> MatrixTile:
    """Choose the tile on tensor cores. mean: rows of an expert."""
    if mean <= _FEW_ROWS:
        return gemm_matrix.NARROW
    b, found = gemm.b, _few_rows_tile(gemm, mean, limits)
    if found is not None:
        tile = found
    elif isinstance(b, str) and gemm.mnk[2] <= gemm_matrix.MOST_RANKS:
        tile = gemm_matrix.OF_RANKS
    elif mean < (_HIGH_ROWS_OF_ARRAYS if isinstance(b, str) else _HIGH_ROWS) or gemm.mnk[2] < _LEAST_K:
        tiles = gemm_matrix.WEIGHT_TILES[16 if isinstance(b, str) else gemm_matrix.unit_of(b, 64, limits.lanes)]
        tile = tiles[int(mean >= _MOST_ROWS)]
    elif isinstance(b, str):
        tile = _OF_ARRAYS
        if not gemm.trans_b and _about(mean, tile.m, limits):
            tile = _ARRAYS_ABOUT_BACKWARD
        elif gemm.trans_b and abs(mean - _ARRAYS_ABOUT_FORWARD.m) <= _ABOUT and limits.lanes <= 32:
            tile = _ARRAYS_ABOUT_FORWARD
    elif not b.nested and abs(mean - _WHOLE_ABOUT.m) <= _ABOUT and limits.lanes <= 32:
        tile = _WHOLE_ABOUT
    elif int(mean) in _WHOLE_ROWS and limits.lanes == _WHOLE.lanes:
        tile = _WHOLE
    elif _about(mean, _WEIGHTS_ABOUT.m, limits):
        tile = _WEIGHTS_ABOUT
    else:
        forward = _FORWARD_FEWER if mean < _FEWER_ROWS else _FORWARD
        tile = forward if gemm.trans_b else _BACKWARD
    return tile if tile.most_workgroup_bytes <= limits.workgroup_bytes else gemm_matrix.MEDIUM


def _about(mean: float, rows: int, limits: Limits) -> bool:
    """Return whether experts have about as many rows as a tile, or a few tiles, of so many."""
    return limits.lanes <= 32 and mean <= _ABOUT_MOST and abs(mean - rows * max(1, round(mean / rows))) <= _ABOUT


def _few_rows_tile(gemm: Gemm, mean: float, limits: Limits) -> MatrixTile | None:
    if gemm.mnk[2] < _LEAST_K or limits.lanes > gemm_matrix.FEW_ROWS_LANES:
        return None
    if isinstance(gemm.b, str):
        return _FEWER_OF_ARRAYS if gemm.trans_b and mean < _HIGH_ROWS_OF_ARRAYS else None
    return next((tile for most, tile in _FEWER if mean < most), None)


def _unit_of(weight: WeightForm, tile: MatrixTile, lanes: int) -> int:
    """Elements of the weight that an invocation decodes at once."""
    if any(tile == few for _, few in _FEWER):
        return widest_unit(weight, 32)
    wider = tile in (_WHOLE, _FORWARD, _BACKWARD, _WEIGHTS_ABOUT, _WHOLE_ABOUT) and lanes <= 32
    return widest_unit(weight, 16) if wider else gemm_matrix.unit_of(weight, tile.m, lanes)


def choose_tile(mean: float, n: int, few_registers: bool = False) -> Tile:
    """Choose the tile without tensor cores. mean: rows of an expert. few_registers: as in Runtime."""
    if n <= _FEW_ROWS:
        return TALL_SKINNY
    if mean <= _FEW_ROWS:
        return FLAT_SKINNY
    if n <= 32 or mean < _MANY_ROWS:
        return SMALL
    if few_registers:
        return FEW_REGISTERS
    return MAIN if mean >= _MOST_ROWS or n < _FLAT.n else _FLAT


@implements("grouped_weight_grad")
def grouped_weight_grad(
    device: Runtime,
    dy: Array,
    x: Array,
    start: Array,
    order: Array | None,
    alpha: float,
    out: Array | None,
    accumulate: bool,
) -> Array:
    if out is None:
        out = device.empty((start.size - 1, dy.shape[1], x.shape[1]))
    of_x = gemm_matrix_skinny.expert_tile(device, x, dy, along_rows=True)
    of_dy = gemm_matrix_skinny.expert_tile(device, dy, x, along_rows=True) if order is None else None
    if of_x is not None:
        launch_gradients(device, of_x, x, dy, out, start, order, alpha, transposed=False, accumulate=accumulate)
    elif of_dy is not None:
        launch_gradients(device, of_dy, dy, x, out, start, None, alpha, transposed=True, accumulate=accumulate)
    else:
        _weight_grad(device, dy, x, out, start, order, alpha, accumulate)
    return out


def _weight_grad(
    device: Runtime,
    dy: Array,
    x: Array,
    out: Array,
    start: Array,
    order: Array | None,
    alpha: float,
    accumulate: bool,
) -> None:
    """The gradient without tensor cores."""
    (rows, n), k, experts = dy.shape, x.shape[1], start.size - 1
    tile_n, tile_k, quads_n, quads_k = _gradient_tile(n, k)
    threads = tile_n * tile_k // (16 * quads_n * quads_k)
    tiles = -(-k // tile_k), -(-n // tile_n)
    wanted = _WANTED_GROUPS // (tiles[0] * tiles[1] * experts)
    shares = max(1, min(_MOST_SHARES, wanted, rows // (experts * _ROWS_OF_SHARE)))
    target = device.empty((shares, *out.shape)) if shares > 1 else out
    constants: dict[str, Constant] = {"DY_KIND": KINDS[dy.dtype_name], "X_KIND": KINDS[x.dtype_name]}
    constants |= {"TILE_N": tile_n, "TILE_K": tile_k, "QN": quads_n, "QK": quads_k, "THREADS": threads}
    constants |= {"DY_LOADS": -(-4 * tile_n // threads), "X_LOADS": -(-4 * tile_k // threads)}
    constants |= {"VEC_DY": n % 4 == 0, "VEC_X": k % 4 == 0, "SPLIT": shares > 1}
    constants |= {"GATHER": order is not None, "ACCUMULATE": accumulate}
    size = out.size // 4 if k % 4 == 0 else out.size
    params = [n, k, 1 if order is None else order.size // x.shape[0], shares, size, float(alpha)]
    groups, work = (*tiles, experts * shares), 2.0 * rows * n * k
    launch_tiles(device, "moe_weight_grad", [dy, x, start, target, order], params, groups, constants, work=work)
    if shares > 1:
        reduce_splits(device, target, Epilogue(out, alpha, accumulate=accumulate), (experts * n, k, shares))


def _gradient_tile(n: int, k: int) -> tuple[int, int, int, int]:
    """Choose N and K of a tile, and vectors of 4 of each of an invocation. One of them is often a LoRA's rank."""
    short = min(n, k)
    if short > 32:
        return 32, 64, 1, 2
    side, quads = (8, 1) if short <= 8 else (16, 1) if short <= 16 else (32, 2)
    return (side, 128, 1, quads) if n <= k else (128, side, quads, 1)
