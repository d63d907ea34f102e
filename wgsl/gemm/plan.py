"""Choice of the kernel for a GEMM, from sizes, dtypes, format and device limits alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from wgrad.device.formats.frozen_weight import FrozenWeight, formats
from wgrad.device.memory import Array
from wgrad.wgsl.formats.formats import BLOCK, KINDS, WeightForm
from wgrad.wgsl.gemm import gemm_int8, gemm_matrix, gemm_matrix_skinny, gemm_skinny, gemm_tile, gemv
from wgrad.wgsl.gemm.gemm_matrix import MatrixTile
from wgrad.wgsl.gemm.gemm_matrix_skinny import SkinnyTile
from wgrad.wgsl.gemm.gemm_skinny import Skinny
from wgrad.wgsl.gemm.gemm_tile import Tile
from wgrad.wgsl.gemm.gemv import VectorTile

if TYPE_CHECKING:
    from wgrad.wgsl.runtime.runtime import Runtime

# Columns of a GEMM, and sides and elements of its left operand, for which that is transposed first: this saves 4 to 9 %
# of the GEMM's time (H200), takes as long as 50 columns, and at most 128 MiB.
_TRANSPOSE_COLUMNS, _TRANSPOSE_SIDE, _TRANSPOSE_ELEMENTS = 2048, 256, (1 << 20, 1 << 25)
# On tensor cores, a weight is dequantized once before its GEMM if there are more rows than these, which are two of the
# tallest tiles. With fewer, every tile of rows decodes it. With exactly as many, it depends on whether the GEMM of
# arrays fills the GPU.
_DEQUANTIZE_ROWS = 512

AnyTile = Tile | MatrixTile | VectorTile


@dataclass(frozen=True)
class Limits:
    """Properties of a device that decide which kernel is used.

    software: the driver runs shaders on the CPU. few_registers: as of Runtime. lanes: of a subgroup of a kernel on
    tensor cores. int8: GEMMs of rounded operands are asked for. matrix_tile, transposes_left: the self-test's switches.
    """

    workgroup_bytes: int
    max_binding_bytes: int = 128 << 20
    software: bool = False
    tensor_cores: bool = False
    lanes: int = 32
    int8: bool = False
    matrix_tile: str = ""
    transposes_left: bool = False
    few_registers: bool = False

    @staticmethod
    def of(device: Runtime) -> Limits:
        """Limits of an open device."""
        return Limits(
            device.workgroup_bytes,
            device.max_binding_bytes,
            device.software,
            device.matrix_units,
            device.lanes,
            device.int8_products,
            device.matrix_tile,
            device.transposes_left,
            device.few_registers,
        )


@dataclass(frozen=True)
class Gemm:
    """Sizes and dtypes of out [M, N] = op(A) op(B).

    a, out: names of dtypes. b: the name of a dtype, or the form of a weight. lda: elements from a row of A to the next;
    A begins at a_column of its rows. plain: nothing is added but `out` itself, and rows of A and out are whole.
    in_blocks: B, of float16, is in blocks (`decode_in_blocks`), for gemm_matrix.wgsl.
    """

    mnk: tuple[int, int, int]
    a: str
    b: str | WeightForm
    out: str
    trans_a: bool = False
    trans_b: bool = False
    batch: int = 1
    lda: int = 0
    a_column: int = 0
    plain: bool = False
    in_blocks: bool = False

    @property
    def row_of_a(self) -> int:
        """Elements from a row of A to the next."""
        return self.lda or self.mnk[0 if self.trans_a else 2]


@dataclass(frozen=True)
class Plan:
    """Kernel of a GEMM, by the name of its file, and how it is launched.

    splits, k_per_split: K is split into so many parts, each so long, and a second launch adds them up. unit: elements
    of B that are read at once. transposes_a: a launch before it transposes A. table: what decoding looks up stands in
    workgroup memory. factored: sums of units are scaled, not their elements. dequantized: dtype to which the weight is
    dequantized before; the rest is the plan for the array. gemm.in_blocks: into blocks.
    """

    gemm: Gemm
    shader: str
    tile: AnyTile | SkinnyTile
    splits: int
    k_per_split: int
    unit: int = 4
    transposes_a: bool = False
    table: bool = False
    factored: bool = False
    dequantized: str = ""
    skinny: Skinny | None = None

    @property
    def groups(self) -> tuple[int, int, int]:
        """Tiles along N and M, and members of the batch or parts of K."""
        m, n, _ = self.gemm.mnk
        if isinstance(self.tile, SkinnyTile):
            assert self.skinny is not None
            return gemm_matrix_skinny.groups(self.skinny, self.tile, self.splits)
        return -(-n // self.tile.n), -(-m // self.tile.m), self.gemm.batch if self.splits == 1 else self.splits

    def __str__(self) -> str:
        if isinstance(self.tile, SkinnyTile):
            tile = f"tile of {self.tile.side}"
        elif isinstance(self.tile, VectorTile):
            tile = f"{self.tile.lanes} threads per {self.tile.n * self.tile.lanes // self.tile.threads} results"
        else:
            tile = f"tile {self.tile.m}x{self.tile.n}x{self.tile.k}"
        parts = [self.shader, tile, f"{' x '.join(map(str, self.groups))} workgroups"]
        if self.splits > 1:
            parts.append(f"K in {self.splits} parts of {self.k_per_split}")
        if self.dequantized:
            parts.append(f"weight dequantized to {self.dequantized} first")
        if self.transposes_a:
            parts.append("A transposed first")
        return ", ".join(parts)


def plan(gemm: Gemm, limits: Limits, tile: AnyTile | None = None, splits: int | None = None) -> Plan:
    """Choose the kernel for a GEMM. tile, splits: replace the choice, for sweeps and tests."""
    free = tile is None and splits is None
    if isinstance(gemm.b, WeightForm) and free:
        if limits.int8 and gemm_int8.served(gemm.b, gemm.mnk[0], limits.max_binding_bytes):
            return Plan(gemm, "gemm_int8", gemm_int8.TILE, *gemm_int8.splits_of(gemm.mnk), table=True)
        dtype = _dequantized(gemm, limits, gemm.b)
        if dtype:
            dense = plan(replace(gemm, b=dtype), limits)
            if dense.shader == "gemm_matrix" and not any(side % BLOCK for side in gemm.b.shape):
                gemm = replace(gemm, in_blocks=True)
                dense = plan(replace(gemm, b=dtype), limits)
            return replace(dense, gemm=gemm, dequantized=dtype)
    if free and gemm.plain and not _few_rows(gemm, limits):
        skinny = gemm_skinny.find(gemm.mnk, gemm.a, str(gemm.b), gemm.out, gemm.trans_a, gemm.trans_b)
        on_cores = skinny and skinny_tile(skinny, limits)
        if skinny and on_cores:
            shares = gemm_matrix_skinny.splits_of(skinny, on_cores)
            return Plan(gemm, "gemm_matrix_skinny", on_cores, *shares, skinny=skinny)
    if limits.software and isinstance(gemm.b, str) and not isinstance(tile, VectorTile):
        tile = splits = None  # there is one kernel
    if tile is None or splits is None:
        chosen = _choose(gemm, limits)
        tile, splits = tile or chosen[0], splits or chosen[1]
    return _with_tile(gemm, limits, tile, splits)


def plan_on(device: Runtime, gemm: Gemm) -> Plan:
    """Choose the kernel for a GEMM on a device. A dry run, in which most GEMMs repeat, remembers the choice."""
    known: dict[tuple[Limits, Gemm], Plan] | None = device.gemm_plans
    limits = Limits.of(device)  # cases of the self-test change them
    if known is None:
        return plan(gemm, limits)
    if (limits, gemm) not in known:
        known[limits, gemm] = plan(gemm, limits)
    return known[limits, gemm]


def skinny_tile(skinny: Skinny, limits: Limits) -> SkinnyTile | None:
    """Choose the tile of gemm_matrix_skinny.wgsl, or None where it does not serve the GEMM on this device."""
    if not limits.tensor_cores:
        return None
    return gemm_matrix_skinny.choose_tile(skinny, limits.workgroup_bytes, limits.lanes)


def _dequantized(gemm: Gemm, limits: Limits, weight: WeightForm) -> str:
    """Dtype to which a weight is dequantized before its GEMM, or "" where it is decoded inside."""
    if weight.shape[1] % weight.unit or (limits.software and not _few_rows(gemm, limits)):
        return "float32"  # a row would start inside a unit of codes; or decoding once is cheaper than once per tile
    if limits.tensor_cores and 2 * weight.shape[0] * weight.shape[1] <= limits.max_binding_bytes:
        m = gemm.mnk[0]
        large = m > _DEQUANTIZE_ROWS
        if m == _DEQUANTIZE_ROWS:
            large = gemm_matrix.choose_tile(*gemm.mnk, 1, limits.workgroup_bytes) == (gemm_matrix.LARGE, 1)
        return "float16" if large and on_tensor_cores(gemm, limits) else ""
    return ""


def _few_rows(gemm: Gemm, limits: Limits) -> bool:
    """Return whether gemv.wgsl serves it."""
    return gemv.served(gemm.mnk[0], gemm.trans_a, gemm.trans_b, gemm.batch, limits.few_registers)


def on_tensor_cores(gemm: Gemm, limits: Limits) -> bool:
    """Return whether gemm_matrix.wgsl serves it on this device."""
    operands = [gemm.a] + ([gemm.b] if isinstance(gemm.b, str) else [])
    served = gemm_matrix.served(operands, gemm.out, gemm.mnk, gemm.trans_a, gemm.trans_b, gemm.row_of_a)
    return limits.tensor_cores and gemm.a_column % 8 == 0 and served


def _choose(gemm: Gemm, limits: Limits) -> tuple[AnyTile, int]:
    """Tile, whose type decides the kernel, and splits of K."""
    (m, n, k), batch, b = gemm.mnk, gemm.batch, gemm.b
    on_cores = on_tensor_cores(gemm, limits)
    if _few_rows(gemm, limits) and not on_cores:
        unit = 4 if isinstance(b, str) else gemv.unit_of(b, m, limits.few_registers)
        return gemv.choose_tile(m, n, k, unit, limits.software), 1
    if limits.software and isinstance(b, str):
        return gemm_tile.software_tile(m, n), 1
    if on_cores:
        forced, memory = limits.matrix_tile, limits.workgroup_bytes
        if isinstance(b, str) or forced:
            few = gemm.trans_b and b == "float16" and limits.lanes <= gemm_matrix.FEW_ROWS_LANES
            chosen = gemm_matrix.choose_tile(m, n, k, batch, memory, forced, few_rows=few)
            return _or_two_at_once(gemm, limits, chosen)
        return gemm_matrix.choose_weight_tile(m, n, k, b, memory, limits.lanes)
    return gemm_tile.choose_tile(m, n, k, batch, limits.few_registers)


def _or_two_at_once(gemm: Gemm, limits: Limits, chosen: tuple[MatrixTile, int]) -> tuple[MatrixTile, int]:
    """As `gemm_matrix.or_two_at_once`, unless a tile is forced or two do not fit."""
    if limits.matrix_tile == "two":
        return gemm_matrix.TWO_AT_ONCE, 1
    needed = 2 * gemm_matrix.TWO_AT_ONCE.workgroup_bytes(gemm.trans_a, gemm.trans_b)
    if limits.matrix_tile or needed > limits.workgroup_bytes:
        return chosen
    return gemm_matrix.or_two_at_once(
        chosen,
        gemm.mnk,
        rounded=gemm.b != "float16",
        trans_a=gemm.trans_a,
        trans_b=gemm.trans_b,
        timed=gemm.batch == 1 and limits.lanes <= 32,
        in_blocks=gemm.in_blocks,
    )


def _with_tile(gemm: Gemm, limits: Limits, tile: AnyTile, splits: int) -> Plan:
    """The plan that follows from a tile and splits of K."""
    (m, _, k), b = gemm.mnk, gemm.b
    per_split = -(-k // splits // tile.k) * tile.k if splits > 1 else k
    cut = (-(-k // per_split), per_split)
    if isinstance(tile, MatrixTile):
        unit = 8 if isinstance(b, str) else gemm_matrix.unit_of(b, m, limits.lanes, tile)
        dealt = tile.for_lanes(limits.lanes, unit)
        return Plan(gemm, "gemm_matrix", dealt, *cut, unit, table=tile.scales_inside)
    if isinstance(tile, VectorTile):
        table = not limits.software
        if isinstance(b, str):
            return Plan(gemm, "gemv", tile, *cut, table=table)
        factored = tile.lanes > 1 and gemv.factored(b.rounded, m)
        return Plan(gemm, "gemv", tile, *cut, gemv.unit_of(b, m, limits.few_registers), table=table, factored=factored)
    transposes = _transposes_a(gemm, limits, tile)
    if isinstance(b, WeightForm):
        return Plan(gemm, "gemm", tile, *cut, b.unit, transposes)
    return Plan(gemm, "gemm_direct" if limits.software else "gemm", tile, *cut, transposes_a=transposes)


def _transposes_a(gemm: Gemm, limits: Limits, tile: Tile) -> bool:
    """Return whether A is transposed before the GEMM: if that saves much more time than it takes, at little memory."""
    (m, n, k), (least, most) = gemm.mnk, _TRANSPOSE_ELEMENTS
    worth = n >= _TRANSPOSE_COLUMNS and min(m, k) >= _TRANSPOSE_SIDE and least <= m * k <= most
    allowed = tile == gemm_tile.MAIN and gemm.batch == 1 and not gemm.trans_a and not limits.software
    return (worth or limits.transposes_left) and allowed


def linear_plan(mnk: tuple[int, int, int], dtype: str, weight: str, backward: bool, limits: Limits) -> Plan:
    """Plan the GEMM of a linear layer: x Wᵀ, or the gradient of x. weight: a dtype or a format of frozen weights."""
    m, n, k = mnk
    form = weight if weight in KINDS else WeightForm(weight, formats()[weight].unit, (n, k))
    sizes = (m, k, n) if backward else mnk
    return plan(Gemm(sizes, dtype, form, dtype, trans_b=not backward, plain=isinstance(form, str)), limits)


def form_of(b: Array | FrozenWeight) -> str | WeightForm:
    """Dtype of an array, or the form of a weight."""
    return b.dtype_name if isinstance(b, Array) else WeightForm.of(b)
