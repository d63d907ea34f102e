"""GEMMs of experts: rows, grouped by expert, with their weights. Shaders: gemm.wgsl, moe_weight_grad.wgsl."""

from __future__ import annotations

import numpy as np

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.memory import Array
from wgrad.wgsl.formats.formats import KINDS, dense_operand, weight_operand
from wgrad.wgsl.formats.quantize import decode
from wgrad.wgsl.gemm.gemm_epilogue import Epilogue
from wgrad.wgsl.gemm.gemm_tile import FLAT_SKINNY, MAIN, SMALL, TALL_SKINNY, Tile
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.dispatch_parts import launch_tiles
from wgrad.wgsl.runtime.runtime import Runtime

# Rows of an expert on average: up to the first, and from the others on, there are other tiles. An expert's last tile is
# half empty on average, which costs an H100 a third of the rate where there are as many rows as in a tile.
_FEW_ROWS, _MANY_ROWS, _MOST_ROWS = 16, 48, 256
_FLAT = Tile(64, 128, 16, 2, 2)


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
    (rows, n), k, experts = end.out.shape, a.shape[1], start.size - 1
    tile = choose_tile(rows, n, experts)
    if isinstance(weight, FrozenWeight):
        operand = weight_operand(weight, weight.unit, table=False, barrier=False)
    else:
        operand = dense_operand(weight, 4)
    switches = {"TRANS_B": trans_b, "VEC_A": k % 4 == 0, "VEC_B": (k if trans_b else n) % 4 == 0}
    constants: dict[str, Constant] = {
        "A_KIND": KINDS[a.dtype.name],
        **operand.constants,
        **tile.constants(operand.unit),
        **switches,
        **end.constants(n),
        **dict.fromkeys(("TRANS_A", "SPLIT", "RESIDUAL_AHEAD", "GROUPED", "HAS_LOWRANK", "PARTS"), False),
        "EDGES": True,
        "EXPERTS": True,
        "GATHER": order is not None,
    }
    chosen = 1 if order is None else order.size // a.shape[0]
    arrays = [a, operand.codes, end.out, start, end.residual, order, None, *operand.scales]
    params: list[int | float] = [rows, n, k, k, n, 0, experts, *operand.parameters, k, 0, 0, float(end.alpha)]
    params += [*operand.stack, chosen, 0, 0]
    columns, tiles = -(-n // tile.n), rows // tile.m + experts
    # As much as there can be: as many full tiles, and one more for each expert that has rows.
    work = 2.0 * tile.m * n * k * (rows // tile.m + min(rows, experts))
    launch_tiles(device, "gemm", arrays, params, (columns, tiles, 1), constants, work=work)


def choose_tile(rows: int, n: int, experts: int) -> Tile:
    """rows: of all experts."""
    if n <= _FEW_ROWS:
        return TALL_SKINNY
    if rows <= _FEW_ROWS * experts:
        return FLAT_SKINNY
    if n <= 32 or rows < _MANY_ROWS * experts:
        return SMALL
    return MAIN if rows >= _MOST_ROWS * experts or n < _FLAT.n else _FLAT


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
    (rows, n), k, experts = dy.shape, x.shape[1], start.size - 1
    if out is None:
        out = device.empty((experts, n, k))
    tile_n, tile_k = (16, 64) if n <= 16 else (64, 16) if k <= 16 else (32, 32)
    kinds = {"DY_KIND": KINDS[dy.dtype.name], "X_KIND": KINDS[x.dtype.name], "SCALAR": False}
    constants: dict[str, Constant] = {"TILE_N": tile_n, "TILE_K": tile_k, **kinds}
    constants |= {"GATHER": order is not None, "ACCUMULATE": accumulate}
    params = [n, k, 1 if order is None else order.size // x.shape[0], float(alpha)]
    groups, work = (-(-k // tile_k), -(-n // tile_n), experts), 2.0 * rows * n * k
    launch_tiles(device, "moe_weight_grad", [dy, x, start, out, order], params, groups, constants, work=work)
    return out
