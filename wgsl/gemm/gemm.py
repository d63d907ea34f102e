"""GEMM with arrays and with weights of any format: gemm*.wgsl, gemv.wgsl. Launches; plan.py chooses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.memory import Array
from wgrad.wgsl.formats.formats import KINDS, WeightOperand, dense_operand, part_bounds, weight_operand
from wgrad.wgsl.gemm import gemm_matrix, gemm_matrix_skinny
from wgrad.wgsl.gemm.gemm_epilogue import Epilogue, reduce_splits
from wgrad.wgsl.gemm.gemm_matrix import MatrixTile
from wgrad.wgsl.gemm.gemm_matrix_skinny import SkinnyTile
from wgrad.wgsl.gemm.gemm_tile import Tile
from wgrad.wgsl.gemm.gemv import VectorTile
from wgrad.wgsl.gemm.plan import AnyTile, Gemm, Limits, Plan, form_of, plan, plan_on
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.cooperative_text import constant_of
from wgrad.wgsl.runtime.dispatch_parts import launch_tiles
from wgrad.wgsl.runtime.runtime import Runtime


def matmul(
    device: Runtime,
    a: Array,
    b: Array | FrozenWeight,
    end: Epilogue,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    in_blocks: bool = False,
    tile: AnyTile | None = None,
    splits: int | None = None,
) -> None:
    """end.out = op(a) op(b) and the epilogue `end`. An array b larger than one binding is bound in row windows.

    in_blocks: as in `Gemm`; b fits one binding.
    """
    batch = a.shape[0] if len(a.shape) == 3 else 1
    m, k = (a.shape[-1], a.shape[-2]) if trans_a else (a.shape[-2], a.shape[-1])
    n = b.shape[-2] if trans_b else b.shape[-1]
    gemm = Gemm((m, n, k), a.dtype_name, form_of(b), end.out.dtype_name, trans_a, trans_b, batch, in_blocks=in_blocks)
    if isinstance(b, Array) and trans_b and batch == 1 and b.nbytes > device.max_binding_bytes:
        for lo, hi in device.row_windows(n, k * b.dtype.itemsize):
            part = device.view(b, (hi - lo, k), lo * k)
            window = replace(gemm, mnk=(m, hi - lo, k))
            multiply(device, window, a, part, replace(end, column=lo, ldc=n), tile, splits)
    else:
        multiply(device, gemm, a, b, end, tile, splits)


def multiply(
    device: Runtime,
    gemm: Gemm,
    a: Array,
    b: Array | FrozenWeight,
    end: Epilogue,
    tile: AnyTile | None = None,
    splits: int | None = None,
) -> None:
    """Plan and launch a GEMM whose arrays fit one binding each. tile, splits: as in `plan`."""
    plain = end.is_plain and gemm.batch == 1 and not gemm.lda and isinstance(b, Array) and not gemm.in_blocks
    gemm = replace(gemm, plain=True) if plain else gemm
    free = tile is None and splits is None
    chosen = plan_on(device, gemm) if free else plan(gemm, Limits.of(device), tile, splits)
    assert chosen.shader != "gemm_int8" and not chosen.dequantized, "linear.py launches these"
    launch(device, chosen, a, b, end)


@dataclass(frozen=True)
class Experts:
    """Rows of a grouped GEMM (gemm.inc.wgsl).

    start: the first row of each expert, and the end. order: the slots of the rows, if rows of A are gathered. chosen:
    slots per row of A.
    """

    start: Array
    order: Array | None
    chosen: int

    @property
    def count(self) -> int:
        return int(self.start.size) - 1


def launch(
    device: Runtime, plan: Plan, a: Array, b: Array | FrozenWeight, end: Epilogue, experts: Experts | None = None
) -> None:
    """Launch what was planned."""
    if isinstance(plan.tile, SkinnyTile):
        assert plan.skinny is not None and isinstance(b, Array)
        x, s = (a, b) if plan.skinny.transposed else (b, a)
        gemm_matrix_skinny.launch(device, plan.skinny, plan.tile, x, s, end.out, end.alpha, end.accumulate)
        return
    gemm = plan.gemm
    (m, n, k), lda = gemm.mnk, gemm.row_of_a
    if plan.transposes_a:
        a = _transposed(device, a, (m, k), lda, gemm.a_column)
        gemm, lda = replace(gemm, trans_a=True, a_column=0), m
    operand = _operand(plan, b)
    split = plan.splits > 1
    target = device.empty((plan.splits, m, n)) if split else end.out
    u, v = end.lowrank or (None, None)
    ld_u = 0 if u is None else u.shape[1]
    arrays = [a, operand.codes, target, end.bias, end.residual, u, v, *operand.scales]
    after = Epilogue.of_parts(n) if split else end.constants(n)
    constants = {
        **_tile_constants(device, plan, a, operand, end),
        "TRANS_A": gemm.trans_a,
        "TRANS_B": gemm.trans_b,
        "IN_BLOCKS": gemm.in_blocks,
        **_read_constants(plan, gemm, lda, end),
        **after,
        "SPLIT": split,
        "GROUPED": experts is None and isinstance(plan.tile, MatrixTile) and plan.groups[0] >= gemm_matrix.MANY_COLUMNS,
        "HAS_LOWRANK": end.lowrank is not None,
        "PARTS": bool(end.parts),
        "EXPERTS": experts is not None,
        "SHORTER": 0,
        "GATHER": experts is not None and experts.order is not None,
    }
    ahead = isinstance(plan.tile, MatrixTile) and bool(after["HAS_RESIDUAL"] and after["VEC_C"])
    timed = experts is None or gemm.mnk[2] <= gemm_matrix.MOST_RANKS  # others may have code for an expert's last rows
    constants["RESIDUAL_AHEAD"] = ahead and timed and _in_memory_of_its_own(end.residual, arrays)
    rank, groups, work = ld_u // max(1, len(end.parts)), plan.groups, 2.0 * gemm.batch * m * n * k
    if experts is not None:
        arrays[3], arrays[5] = experts.start, experts.order
        rank, ld_u, constants["EDGES"] = experts.count, experts.chosen, True
        if isinstance(plan.tile, MatrixTile):
            constants |= plan.tile.expert_constants()
        groups = groups[0], m // plan.tile.m + experts.count, 1
        # The most that there can be: all full tiles, and one more for each expert that has rows.
        work = 2.0 * plan.tile.m * n * k * (m // plan.tile.m + min(m, experts.count))
    sizes = [m, n, k, plan.k_per_split, end.row_stride, end.column, rank]
    params: list[int | float] = [*sizes, *operand.parameters, lda, gemm.a_column, 0]
    params += [float(end.alpha), *operand.stack, ld_u, *part_bounds(end.parts, end.row_stride)]
    if isinstance(plan.tile, VectorTile) and experts is None:  # few rows: a dispatch is never long
        groups = device.groups(n, plan.tile.n)
        device.launch(plan.shader, arrays, [*params, 0, 0], groups, constants, work=work)
    else:
        launch_tiles(device, plan.shader, arrays, params, groups, constants, work=work)
    if split:
        reduce_splits(device, target, end, (m, n, plan.splits))


def _operand(plan: Plan, b: Array | FrozenWeight) -> WeightOperand:
    """The right operand as the kernel reads it."""
    if isinstance(b, Array):
        return dense_operand(b, plan.unit)
    how = {"table": plan.table, "factored": plan.factored, "barrier": not isinstance(plan.tile, Tile)}
    if isinstance(plan.tile, MatrixTile):
        how |= {"halves": True, "shuffled": plan.tile.shuffles}
    return weight_operand(b, plan.unit, **how)


def _tile_constants(
    device: Runtime, plan: Plan, a: Array, operand: WeightOperand, end: Epilogue
) -> dict[str, Constant]:
    """The constants that follow from the operands and the tile."""
    tile, (m, _, k) = plan.tile, plan.gemm.mnk
    assert not isinstance(tile, SkinnyTile)
    kinds: dict[str, Constant] = {"A_KIND": KINDS[a.dtype_name], **operand.constants}
    if isinstance(tile, MatrixTile):
        kinds |= {"SUBGROUP_BARRIER": device.subgroup_barrier, **constant_of(device.matrix_shape)}
        return {**kinds, **tile.constants(k, end.out, plan.unit)}
    if isinstance(tile, VectorTile):
        whole = {"FACTORED": False, "GROUPS": 1, "GROUP_QUADS": 1}
        return {**whole, **kinds, **tile.constants(min(m, tile.m), device.subgroups)}
    edges = {} if plan.shader == "gemm_direct" else {"EDGES": tile.has_edges(plan.gemm.mnk, plan.unit)}
    return {**kinds, **tile.constants(plan.unit), **edges}


def _read_constants(plan: Plan, gemm: Gemm, lda: int, end: Epilogue) -> dict[str, Constant]:
    """How the operands and the LoRA term are read. gemm, lda: after A was transposed, if it was."""
    tile, (_, n, k) = plan.tile, gemm.mnk
    if not isinstance(tile, MatrixTile):
        vectors = {"VEC_A": lda % 4 == 0 and gemm.a_column % 4 == 0, "VEC_B": (k if gemm.trans_b else n) % 4 == 0}
        return {**vectors, "U_T": "f32", "V_T": "f32"}
    rank = 0 if end.lowrank is None else end.lowrank[0].shape[1] // max(1, len(end.parts))
    bounds = [bound - end.column for bound in part_bounds(end.parts, end.column)]  # 0 where there are no parts
    last_k = k - (plan.splits - 1) * plan.k_per_split  # of the last split
    return {
        **tile.lowrank_constants(rank, gemm.trans_a, gemm.trans_b, end.out, bounds),
        "AHEAD": tile.ahead and last_k > tile.k,
    }


def _transposed(device: Runtime, a: Array, mk: tuple[int, int], lda: int, column: int) -> Array:
    """Return [K, M] float32: the columns of `a` from `column` on, whose row stride is lda, as rows."""
    m, k = mk
    out = device.empty((k, m))
    constants: dict[str, Constant] = {"A_KIND": KINDS[a.dtype_name], "VEC_A": False}
    groups = (-(-k // 32), -(-m // 32), 1)
    device.launch("gemm_transpose", [a, out], [m, k, lda, column], groups, constants, work=8.0 * m * k)
    return out


def _in_memory_of_its_own(array: Array | None, arrays: list[Array | None]) -> bool:
    """Return whether no other array is in the same block, as WebGPU demands of an array that could be written."""
    blocks = [other.lease.block for other in arrays if other is not None]
    return array is not None and blocks.count(array.lease.block) == 1


@implements("gemm")
def gemm(
    device: Runtime,
    a: Array,
    b: Array,
    trans_a: bool,
    trans_b: bool,
    alpha: float,
    bias: Array | None,
    residual: Array | None,
    lowrank: tuple[Array, Array] | None,
    out: Array | None,
    accumulate: bool,
    dtype: np.dtype,
) -> Array:
    if out is None:
        rows, columns = a.shape[-1 if trans_a else -2], b.shape[-2 if trans_b else -1]
        out = device.empty((*a.shape[:-2], rows, columns), dtype)
    end = Epilogue(out, alpha, bias, residual, lowrank, accumulate=accumulate)
    matmul(device, a, b, end, trans_a=trans_a, trans_b=trans_b)
    return out
