"""Matrix products of dense arrays and weights of any format: gemm*.wgsl, gemv.wgsl."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from wgrad.device.memory import Array
from wgrad.wgsl.formats.formats import KINDS, WeightOperand, part_bounds, weight_operand
from wgrad.wgsl.gemm import gemm_matrix, gemm_matrix_skinny, gemm_skinny, gemv
from wgrad.wgsl.gemm.gemm_epilogue import Epilogue, reduce_splits
from wgrad.wgsl.gemm.gemm_matrix import MatrixTile
from wgrad.wgsl.gemm.gemv import VectorTile
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime


@dataclass(frozen=True)
class Tile:
    """A workgroup's tile of the result, and the 4 x 4 blocks (tm4 x tn4) that a thread owns of it."""

    m: int
    n: int
    k: int
    tm4: int
    tn4: int

    @property
    def threads(self) -> int:
        return (self.m // 4 // self.tm4) * (self.n // 4 // self.tn4)

    @property
    def workgroup_bytes(self) -> int:
        return (self.m + self.n) * self.k * 4 + 64

    def has_edges(self, mnk: tuple[int, int, int], unit: int) -> bool:
        """Return whether a tile reaches beyond M, N or K, or its invocations beyond it. unit: as of `constants`."""
        loads = (self.m * self.k // 4, self.n * self.k // unit)
        whole = all(size % part == 0 for size, part in zip(mnk, (self.m, self.n, self.k)))
        return not whole or any(count % self.threads for count in loads)

    def constants(self, unit: int) -> dict[str, Constant]:
        """unit: elements of B that are read at once."""
        return {
            "TILE_M": self.m,
            "TILE_N": self.n,
            "TILE_K": self.k,
            "TM4": self.tm4,
            "TN4": self.tn4,
            "ACC_ROWS": 4 * self.tm4,
            "LOADS_A": -(-self.m * self.k // 4 // self.threads),
            "LOADS_B": -(-self.n * self.k // unit // self.threads),
        }


AnyTile = Tile | MatrixTile | VectorTile

# Measured on an H100 (bench/bench_gemm.py --sweep): 128 x 64 is best or within a few percent of it for every shape of
# the 135M, 1B and 8B models; 128 x 128 leaves too few workgroups to hide latency
# (bench/notes/rejected-float32-gemm.md).
MAIN = Tile(128, 64, 16, 2, 2)
SMALL = Tile(32, 32, 16, 1, 1)
TALL_SKINNY = Tile(64, 16, 16, 1, 1)  # LoRA: N = rank
FLAT_SKINNY = Tile(16, 64, 16, 1, 1)  # LoRA: M = rank; decoding: M = 1


def software_tile(m: int, n: int) -> Tile:
    """On software drivers: no workgroup memory, 16 x 16 results an invocation (fewer reads a multiplication)."""
    return Tile(16 if m <= 16 else 128, 16 if n <= 16 else 128, 4, 4, 4)


# WebGPU does not tell how many workgroups a card runs at once. Products of fewer tiles than _FEW_TILES are split over K
# until there are about _WANTED_GROUPS, which fills the largest cards and costs small ones only the second pass.
_FEW_TILES, _WANTED_GROUPS, _WANTED_SKINNY_GROUPS = 300, 800, 288
_MIN_K_PER_SPLIT, _MIN_K_PER_SKINNY_SPLIT = 144, 64
_MAX_SPLITS, _MAX_SKINNY_SPLITS = 32, 16
# Columns of a product, and sides and elements of its left operand, for which that is transposed first: gains 4 to 9 %
# of the product (H200), takes as long as 50 columns, and 128 MiB at most.
_TRANSPOSE_COLUMNS, _TRANSPOSE_SIDE, _TRANSPOSE_ELEMENTS = 2048, 256, (1 << 20, 1 << 25)


def choose_tile(m: int, n: int, k: int, batch: int = 1) -> tuple[Tile, int]:
    """Tile and number of splits of K."""
    if min(m, n) <= 16:
        tile = TALL_SKINNY if n <= 16 else FLAT_SKINNY
        if batch > 1:
            return tile, 1
        splits = min(round(_WANTED_SKINNY_GROUPS / _count(m, n, tile)), k // _MIN_K_PER_SKINNY_SPLIT)
        return tile, max(1, min(splits, _MAX_SKINNY_SPLITS))
    tile = SMALL if min(m, n) <= 32 else MAIN
    tiles = _count(m, n, tile) * batch
    if batch > 1 or tiles >= 2 * _FEW_TILES:
        return tile, 1
    if tiles >= _FEW_TILES:
        return tile, 2 if k >= 2048 else 1
    return tile, max(1, min(round(_WANTED_GROUPS / tiles), k // _MIN_K_PER_SPLIT, _MAX_SPLITS))


def _count(m: int, n: int, tile: Tile) -> int:
    return -(-m // tile.m) * -(-n // tile.n)


def product(
    device: Runtime,
    a: Array,
    b: Any,
    out: Array,
    mnk: tuple[int, int, int],
    *,
    batch: int = 1,
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: float = 1.0,
    bias: Array | None = None,
    residual: Array | None = None,
    lowrank: tuple[Array, Array] | None = None,
    accumulate: bool = False,
    column: int = 0,
    ldc: int | None = None,
    a_column: int = 0,
    lda: int | None = None,
    parts: tuple[int, ...] = (),
    tile: AnyTile | None = None,
    splits: int | None = None,
) -> None:
    """One product into `out` (its columns from `column` on, row stride `ldc`); `a` likewise. b: array or weight.
    parts: columns of each weight of a stack, whose terms of `lowrank` these are."""
    m, n, k = mnk
    few_rows = gemv.served(m, trans_a, trans_b, batch)
    plain = bias is None and residual is None and lowrank is None and batch == 1 and ldc is None and lda is None
    plain = plain and not few_rows and isinstance(b, Array)
    skinny = gemm_skinny.find(a, b, out, mnk, trans_a, trans_b) if plain else None
    if skinny is not None and tile is None and splits is None and device.matrix_units:
        on_units = gemm_matrix_skinny.choose_tile(skinny, device.workgroup_bytes, device.lanes)
        if on_units is not None:
            gemm_matrix_skinny.launch(device, skinny, on_units, out, alpha, accumulate)
            return
    lda = lda or (m if trans_a else k)
    end = Epilogue(out, ldc or n, column, alpha, bias, residual, accumulate)
    if device.software and isinstance(b, Array) and not isinstance(tile, VectorTile):
        tile = splits = None
    if tile is None or splits is None:
        units = device.matrix_units and a_column % 8 == 0
        units = units and gemm_matrix.served(a, b, out, mnk, trans_a, trans_b, lda)
        chosen = _choose(device, b, mnk, batch, few_rows, units, trans_b)
        tile, splits = tile or chosen[0], splits or chosen[1]
    if _transpose_first(device, tile, mnk, batch, trans_a):
        a, trans_a, lda, a_column = _transposed(device, a, (m, k), lda, a_column), True, m, 0
    shader, operand, constants = _kernel(device, tile, a, b, out, mnk)
    vectors = {"VEC_A": lda % 4 == 0 and a_column % 4 == 0, "VEC_B": (k if trans_b else n) % 4 == 0}
    constants |= {"TRANS_A": trans_a, "TRANS_B": trans_b, **({} if isinstance(tile, MatrixTile) else vectors)}
    k_per_split = -(-k // splits // tile.k) * tile.k if splits > 1 else k
    target = device.empty((splits, m, n)) if splits > 1 else out
    now = Epilogue.of_parts(n) if splits > 1 else end.constants(n)
    u, v = lowrank or (None, None)
    ld_u = 0 if u is None else u.shape[1]
    rank = ld_u // max(1, len(parts))
    if isinstance(tile, MatrixTile):
        bounds = [bound - column for bound in part_bounds(parts, column)]  # the tile's column 0 where there is none
        constants |= tile.lowrank_constants(rank, trans_a, trans_b, out, bounds)
        last_k = k - (-(-k // k_per_split) - 1) * k_per_split  # of the last split
        constants["AHEAD"] = tile.ahead and last_k > tile.k
    else:
        constants |= {"U_T": "f32", "V_T": "f32"}
    sizes = [m, n, k, k_per_split, end.ldc, column, rank, *operand.parameters, lda, a_column, 0]
    groups = (-(-n // tile.n), -(-m // tile.m), batch if splits == 1 else -(-k // k_per_split))
    grouped = isinstance(tile, MatrixTile) and groups[0] >= gemm_matrix.MANY_COLUMNS
    arrays = [a, operand.codes, target, bias, residual, u, v, *operand.scales]
    switches = {"SPLIT": splits > 1, "GROUPED": grouped, "HAS_LOWRANK": lowrank is not None, "PARTS": bool(parts)}
    ahead = isinstance(tile, MatrixTile) and bool(now["HAS_RESIDUAL"] and now["VEC_C"])
    switches["RESIDUAL_AHEAD"] = ahead and _in_memory_of_its_own(residual, arrays)
    device.launch(
        shader,
        arrays,
        [*sizes, float(alpha), *operand.stack, ld_u, *part_bounds(parts, end.ldc)],
        device.groups(n, tile.n) if isinstance(tile, VectorTile) else groups,
        {**constants, **now, **switches},
        work=2.0 * batch * m * n * k,
    )
    if splits > 1:
        reduce_splits(device, target, end, (m, n, -(-k // k_per_split)))


def _transpose_first(device: Runtime, tile: AnyTile, mnk: tuple[int, int, int], batch: int, trans_a: bool) -> bool:
    """Return whether the left operand is transposed before the product: where that takes a small part of what it gains,
    and little memory."""
    m, n, k = mnk
    least, most = _TRANSPOSE_ELEMENTS
    worth = n >= _TRANSPOSE_COLUMNS and min(m, k) >= _TRANSPOSE_SIDE and least <= m * k <= most
    return (worth or device.transposes_left) and tile == MAIN and batch == 1 and not trans_a and not device.software


def _transposed(device: Runtime, a: Array, mk: tuple[int, int], lda: int, column: int) -> Array:
    """[K, M] float32 of the columns of `a` from `column` on, whose row stride is lda."""
    m, k = mk
    out = device.empty((k, m))
    constants: dict[str, Constant] = {"A_KIND": KINDS[a.dtype.name], "VEC_A": False}
    groups = (-(-k // 32), -(-m // 32), 1)
    device.launch("gemm_transpose", [a, out], [m, k, lda, column], groups, constants, work=8.0 * m * k)
    return out


def _in_memory_of_its_own(array: Array | None, arrays: list[Array | None]) -> bool:
    """Return whether no other of the arrays lies in the same block: what WebGPU asks of one that could be written."""
    blocks = [other.lease.block for other in arrays if other is not None]
    return array is not None and blocks.count(array.lease.block) == 1


def _choose(
    device: Runtime, b: Any, mnk: tuple[int, int, int], batch: int, few_rows: bool, on_units: bool, trans_b: bool
) -> tuple[AnyTile, int]:
    """Tile, which stands for a kernel, and splits of K. few_rows, on_units: gemv.wgsl, gemm_matrix.wgsl serve it."""
    m, n, k = mnk
    if few_rows and not on_units:
        unit = 4 if isinstance(b, Array) else gemv.unit_of(b, m)
        return gemv.choose_tile(m, n, k, unit, device.software), 1
    if device.software and isinstance(b, Array):
        return software_tile(m, n), 1
    if on_units:
        if isinstance(b, Array) or device.matrix_tile:
            rounded = trans_b and isinstance(b, Array) and b.dtype != np.float16
            return gemm_matrix.choose_tile(m, n, k, batch, device.workgroup_bytes, device.matrix_tile, rounded=rounded)
        return gemm_matrix.choose_weight_tile(m, n, k, b, device.workgroup_bytes, device.lanes)
    return choose_tile(m, n, k, batch)


def _kernel(
    device: Runtime, tile: AnyTile, a: Array, b: Any, out: Array, mnk: tuple[int, int, int]
) -> tuple[str, WeightOperand, dict[str, Constant]]:
    """-> shader, right operand, and the constants that follow from the two and the tile."""
    dense = isinstance(b, Array)
    table = tile.scales_inside if isinstance(tile, MatrixTile) else isinstance(tile, VectorTile) and not device.software
    if dense:
        operand = dense_operand(b, tile)
    else:
        unit, factored = b.unit, False
        if isinstance(tile, VectorTile):
            unit, factored = gemv.unit_of(b, mnk[0]), tile.lanes > 1 and gemv.factored(b, mnk[0])
        elif isinstance(tile, MatrixTile):
            unit = gemm_matrix.unit_of(b, mnk[0], device.lanes)
        operand = weight_operand(b, unit, table=table, barrier=not isinstance(tile, Tile), factored=factored)
    constants: dict[str, Constant] = {"A_KIND": KINDS[a.dtype.name], **operand.constants}
    if isinstance(tile, MatrixTile):
        dealt = tile.for_lanes(device.lanes, operand.unit)
        return "gemm_matrix", operand, {**constants, **dealt.constants(mnk[2], out, operand.unit)}
    if isinstance(tile, VectorTile):
        whole = {"FACTORED": False, "GROUPS": 1, "GROUP_QUADS": 1}
        return "gemv", operand, {**whole, **constants, **tile.constants(mnk[0], device.subgroups)}
    constants |= tile.constants(operand.unit)
    if device.software and dense:
        return "gemm_direct", operand, constants
    return "gemm", operand, {**constants, "EDGES": tile.has_edges(mnk, operand.unit)}


def dense_operand(b: Array, tile: AnyTile) -> WeightOperand:
    """An array as the right operand."""
    file, unit = ("gemm.inc.wgsl:matrix_dense", 8) if isinstance(tile, MatrixTile) else ("gemm.inc.wgsl:dense", 4)
    return WeightOperand(file, unit, {"B_KIND": KINDS[b.dtype.name]}, b)


def matmul(
    device: Runtime, a: Array, b: Array, out: Array, *, trans_a: bool = False, trans_b: bool = False, **options: Any
) -> None:
    """out = op(a) op(b) of whole arrays; options: as of `product`. A large b is taken in windows."""
    batch = a.shape[0] if len(a.shape) == 3 else 1
    m, k = (a.shape[-1], a.shape[-2]) if trans_a else (a.shape[-2], a.shape[-1])
    n = b.shape[-2] if trans_b else b.shape[-1]
    options |= {"batch": batch, "trans_a": trans_a, "trans_b": trans_b}
    if trans_b and batch == 1 and b.nbytes > device.max_binding_bytes:
        for lo, hi in device.row_windows(n, k * b.dtype.itemsize):
            part = device.view(b, (hi - lo, k), lo * k)
            product(device, a, part, out, (m, hi - lo, k), column=lo, ldc=n, **options)
    else:
        product(device, a, b, out, (m, n, k), **options)


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
    added = {"bias": bias, "residual": residual, "lowrank": lowrank, "accumulate": accumulate}
    matmul(device, a, b, out, trans_a=trans_a, trans_b=trans_b, alpha=alpha, **added)
    return out
