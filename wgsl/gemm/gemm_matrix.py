"""Tiles of GEMM on tensor cores (gemm_matrix.wgsl), and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.memory import Array
from wgrad.wgsl.formats.formats import WeightForm, widest_unit
from wgrad.wgsl.runtime.compile import Constant

_LEVELS, _NESTED_SCALES = 4 * 16, 4 * 256  # bytes of decoding tables: NF4 and MXFP4; NF4 alone
_PAD = 8  # elements after each row of a tile in workgroup memory


@dataclass(frozen=True)
class MatrixTile:
    """sg_m x sg_n subgroups, each with sub_m x (groups * sub_j) cooperative matrices of 16 x 16; k deep.

    The epilogue passes sub_j matrices per subgroup at a time through workgroup memory, next to the tiles.

    ahead: tiles are loaded two steps before they are multiplied, for twice the registers.
    scales_inside: NF4's nested scales are looked up in workgroup memory.
    shorter: one or two smaller values of sub_m, rising, for which the shader has code for the last rows of an expert.
    taller: blocks of 16 rows by which an expert's last full tile may be higher, so that they need no tile of their own.
    All subgroups multiply such a block together, each some of its columns.
    decode_first: B is decoded before A is stored to workgroup memory, and NF4's levels are found by shuffles.
    """

    sg_m: int
    sg_n: int
    sub_m: int
    groups: int
    sub_j: int
    k: int = 32
    ahead: bool = False
    scales_inside: bool = True
    shorter: tuple[int, ...] = ()
    taller: int = 0
    decode_first: bool = False
    lanes: int = field(default=32, compare=False)  # of a subgroup

    @property
    def m(self) -> int:
        return 16 * self.sub_m * self.sg_m

    @property
    def n(self) -> int:
        return 16 * self.groups * self.sub_j * self.sg_n

    @property
    def threads(self) -> int:
        return self.lanes * self.sg_m * self.sg_n

    @property
    def shuffles(self) -> bool:
        """Return whether NF4's levels are in the invocations of a subgroup, and not in workgroup memory."""
        return self.decode_first and self.lanes >= 16

    def for_lanes(self, lanes: int, unit: int) -> MatrixTile:
        """The same tile in subgroups of `lanes`, in so few that every invocation loads equally much.

        unit: elements of B that are read at once.
        """
        tile = replace(self, lanes=lanes)
        while tile.m * tile.k % (8 * tile.threads) or tile.n * tile.k % (max(unit, 8) * tile.threads):
            if tile.sg_n % 2 == 0:
                tile = replace(tile, sg_n=tile.sg_n // 2, groups=2 * tile.groups)
            else:
                assert tile.sg_m % 2 == 0, "a tile has a load for each invocation of a subgroup"
                tile = replace(tile, sg_m=tile.sg_m // 2, sub_m=2 * tile.sub_m)
        times = tile.sub_m // self.sub_m
        return replace(tile, shorter=tuple(times * rows for rows in self.shorter))

    @property
    def loads_a(self) -> int:
        """Loads of 8 elements of A per invocation and tile."""
        return self.m * self.k // 8 // self.threads

    @property
    def most_workgroup_bytes(self) -> int:
        """Workgroup memory, of the transpositions that take most."""
        tables = _LEVELS + _NESTED_SCALES * self.scales_inside
        return tables + max(self.workgroup_bytes(ta, tb) for ta in (False, True) for tb in (False, True))

    def workgroup_bytes(self, trans_a: bool, trans_b: bool) -> int:
        """Workgroup memory without decoding tables."""
        a = self.k * (self.m + _PAD) if trans_a else (self.m + 16 * self.taller) * (self.k + _PAD)
        b = self.n * (self.k + _PAD) if trans_b else self.k * (self.n + _PAD)
        return 2 * (a + b - 2 * _PAD) + 4 * self.sg_m * self.sg_n * 16 * 16 * self.sub_j

    def constants(self, k: int, out: Array, unit: int) -> dict[str, Constant]:
        """unit: elements of B that are read at once."""
        assert self.m * self.k % (8 * self.threads) == 0, "every invocation reads as much of A"
        assert self.n * self.k % (max(unit, 8) * self.threads) == 0, "every invocation reads as much of B"
        return {
            "SG_M": self.sg_m,
            "SG_N": self.sg_n,
            "SUB_M": self.sub_m,
            "SUB_G": self.groups,
            "SUB_J": self.sub_j,
            "TILE_K": self.k,
            "K_STEPS": self.k // 16,
            "PIECES": 3 if out.dtype == np.float32 else 1,
            "K_EDGE": k % self.k != 0,
            "LOADS_A": self.loads_a,
            "LOADS_B": self.n * self.k // unit // self.threads,
            "EIGHTS_B": unit // 8,
            "LOADS_V": self.n * self.k // 8 // self.threads,
            "STORES": 64 * self.sub_j // self.lanes,
            "LANES": self.lanes,
            "TALLER": 0,
            "EXTRA": 0,
            "LOADS_EXTRA": 0,
            "EXTRA_J": self.n // 16 // (self.sg_m * self.sg_n),
            "STORES_EXTRA": 64 // self.lanes,
            "DECODE_FIRST": self.decode_first,
        }

    def expert_constants(self) -> dict[str, Constant]:
        """Return the constants of the code for an expert's last rows: fewer than a tile has, or more."""
        # Loads of more rows than there are stay within the tile.
        found: dict[str, Constant] = {"SHORTER": len(self.shorter), "TALLER": self.taller}
        for number, rows in enumerate(self.shorter, 1):
            found |= {f"SUB_M_{number}": rows, f"LOADS_A_{number}": -(-self.loads_a * rows // self.sub_m)}
            found |= {f"EXTRA_{number}": 0, f"LOADS_EXTRA_{number}": 0}
        if self.taller:
            assert self.n % (16 * self.sg_m * self.sg_n) == 0, "subgroups share the columns of the rows beyond a tile"
            found |= {"SUB_M_TALLER": self.sub_m, "LOADS_A_TALLER": self.loads_a, "EXTRA_TALLER": self.taller}
            found["LOADS_EXTRA_TALLER"] = -(-2 * self.taller * self.k // self.threads)
        return found

    def lowrank_constants(
        self, rank: int, trans_a: bool, trans_b: bool, out: Array, bounds: Sequence[int]
    ) -> dict[str, Constant]:
        """How the LoRA term is read, and when.

        It is the first step of K if its ranks fit one tile and no tile has columns of two parts (bounds: where parts
        begin).
        """
        vec_u, vec_v = not trans_a and rank % 4 == 0, not trans_b or rank % 4 == 0
        first = 0 < rank <= self.k and out.dtype != np.float32 and not any(bound % self.n for bound in bounds)
        return {
            "VEC_U": vec_u,
            "VEC_V": vec_v,
            "U_T": "vec4<f32>" if vec_u else "f32",
            "V_T": "vec4<f32>" if vec_v else "f32",
            "LOWRANK_FIRST": first,
            "LOWRANK_LAST": rank > 0 and not first,
        }


# Measured on an H200 (bench/bench_gemm.py): 128 x 256 is best wherever it fills most of the GPU, also by long splits of
# K, as for the gradient of the output layer's input.
LARGE = MatrixTile(2, 4, 4, 4, 1, ahead=True)  # 128 x 256
# Two workgroups per compute unit: one loads while the other multiplies (`or_two_at_once`, bench/notes/gemm-blocks.md).
TWO_AT_ONCE = MatrixTile(2, 2, 4, 4, 1)  # 128 x 128
OF_HEADS = MatrixTile(2, 2, 4, 4, 1, ahead=True)  # 128 x 128; for an output layer that is rounded as it is loaded
MEDIUM = MatrixTile(2, 2, 4, 2, 2)  # 128 x 128
# 16 x 64: decoding several prompts. Without NF4's nested scales in workgroup memory, three workgroups run per compute
# unit; with them two do, and it takes 1.02 to 1.19 times as long.
NARROW = MatrixTile(1, 4, 1, 1, 1, 64, ahead=True, scales_inside=False)
_ENOUGH_LARGE, _WANTED_MEDIUM = 96, 132
_MANY_LARGE, _HEAD_COLUMNS = 512, 16384  # tiles of LARGE; columns of the narrowest head
# Least K for so many splits of TWO_AT_ONCE: as many as fill a GPU twice.
_LEAST_K_OF_SPLITS = {2: 4096, 3: 1536, 4: 4096}
# Multiprocessors of an H200, and the workgroup memory of one (bench/notes/tensor-cores.md).
_MULTIPROCESSORS, _SHARED_BYTES = 132, 48 << 10
# For more than 16 rows with a weight decoded inside, by the elements that an invocation decodes at once: 8 of NF4, 16
# of the others; 32 is slower for most (bench/notes/rejected-tensor-cores.md). Every tile of rows decodes the weight
# anew, so the tile that holds all rows is taken. Some subgroups multiply while others decode: eight of them, in one
# workgroup or two, on each of an H200's multiprocessors.
WEIGHT_TILES = {
    8: (
        MatrixTile(2, 2, 2, 1, 2, ahead=True),  # 64 x 64
        MatrixTile(4, 2, 2, 2, 2, ahead=True),  # 128 x 128
        MatrixTile(4, 2, 4, 2, 2, ahead=True),  # 256 x 128
    ),
    16: (
        MatrixTile(1, 4, 4, 1, 2, ahead=True),  # 64 x 128
        MatrixTile(2, 2, 4, 1, 2, ahead=True),  # 128 x 64
        MatrixTile(4, 2, 4, 2, 2, ahead=True),  # 256 x 128
    ),
}
_WANTED_SUBGROUPS = 8 * _MULTIPROCESSORS
# Of 17 to 128 rows: 64 of K, and 32 elements decoded at once, take 0.65 to 0.96 of the time of those above on an H100
# (bench/notes/decoding.md). Subgroups of 64 were not timed.
FEW_ROWS_TILES = (
    MatrixTile(1, 4, 2, 1, 1, 64, ahead=True, scales_inside=False),  # 32 x 64
    MatrixTile(2, 2, 2, 2, 1, 64, ahead=True, scales_inside=False),  # 64 x 64
    MatrixTile(2, 4, 4, 2, 1, 64, ahead=True, scales_inside=False),  # 128 x 128
)
FEW_ROWS_LANES = 32
# Arrays of float16, 33 to 64 rows forward: 0.56 to 0.77 of the time of MEDIUM.
FEW_ROWS_OF_ARRAYS = MatrixTile(1, 4, 4, 1, 1, 64, ahead=True)  # 64 x 64
# Of experts with more than 16 rows, up to so large a K, such as LoRA's rank. Bound by memory: several small workgroups
# run at once, and what is added is loaded ahead (bench/notes/experts.md).
OF_RANKS, MOST_RANKS = MatrixTile(2, 2, 2, 2, 1, 16), 32  # 64 x 64
# Tiles side by side from which on several rows of them go along N together; with fewer it costs up to 3 %.
MANY_COLUMNS = 64
_MIN_K_PER_SPLIT, _MIN_K_PER_LARGE_SPLIT, _MAX_SPLITS, _MAX_NARROW_SPLITS = 512, 4096, 8, 12
_MIN_SIDE = 64  # with fewer columns, or rows of A^T, most of a tile is empty
_MIN_ROWS = 8  # fewer are faster in gemv.wgsl, which serves transposed right operands


def served(
    operands: Sequence[str], out: str, mnk: tuple[int, int, int], trans_a: bool, trans_b: bool, lda: int
) -> bool:
    """Return whether a GEMM runs on tensor cores.

    An array or the result must be float16, a float32 array is rounded only if the result is float16, and rows start at
    multiples of 8 elements. operands, out: dtypes.
    """
    m, n, k = mnk
    least = _MIN_SIDE if trans_a else _MIN_ROWS if trans_b else 1
    if "float16" not in (*operands, out) or n < _MIN_SIDE or m < least:
        return False
    if out == "float32" and "float32" in operands:
        return False
    return lda % 8 == 0 and (k if trans_b else n) % 8 == 0 and n % 8 == 0 and (m if trans_a else k) % 8 == 0


def choose_tile(
    m: int,
    n: int,
    k: int,
    batch: int,
    workgroup_bytes: int,
    forced: str = "",
    *,
    few_rows: bool = False,
) -> tuple[MatrixTile, int]:
    """Tile and number of splits of K. workgroup_bytes: of the device. forced: "medium" or "large", where it fits.
    few_rows: FEW_ROWS_OF_ARRAYS may serve it."""
    if few_rows and batch == 1 and not forced and 2 * NARROW.m < m <= FEW_ROWS_OF_ARRAYS.m:
        return FEW_ROWS_OF_ARRAYS, _wave_splits(FEW_ROWS_OF_ARRAYS, m, n, k)
    if m < _MIN_SIDE:
        return NARROW, _wave_splits(NARROW, m, n, k) if batch == 1 else 1
    if forced != "medium" and LARGE.most_workgroup_bytes <= workgroup_bytes:
        tiles = -(-m // LARGE.m) * -(-n // LARGE.n) * batch
        if tiles >= _ENOUGH_LARGE or forced == "large":
            return LARGE, 1
        splits = min(_WANTED_MEDIUM // tiles, k // _MIN_K_PER_LARGE_SPLIT, _MAX_SPLITS)
        if batch == 1 and tiles * splits >= _ENOUGH_LARGE:
            return LARGE, splits
    tiles = -(-m // MEDIUM.m) * -(-n // MEDIUM.n)
    if batch > 1 or forced:
        return MEDIUM, 1
    return MEDIUM, max(1, min(_WANTED_MEDIUM // tiles, k // _MIN_K_PER_SPLIT, _MAX_SPLITS))


def or_two_at_once(
    chosen: tuple[MatrixTile, int],
    mnk: tuple[int, int, int],
    *,
    rounded: bool,
    trans_a: bool,
    trans_b: bool,
    timed: bool,
    in_blocks: bool,
) -> tuple[MatrixTile, int]:
    """Replace the choice of `choose_tile` by a 128 x 128 tile that runs twice on a compute unit where that is faster.

    On an H100 it takes 0.83 to 0.94 of LARGE's time where the right operand is rounded to float16, 0.91 to 1.01 where
    the left one is transposed, 0.95 to 1.00 with many tiles; and 0.53 to 0.93 of MEDIUM's where splits fill the GPU
    twice. rounded: the right operand, to float16. timed: not one of a batch, and of subgroups of up to 32.
    """
    (tile, splits), (m, n, k) = chosen, mnk
    if tile == LARGE and rounded and trans_b and splits == 1:
        return (TWO_AT_ONCE if timed and n < _HEAD_COLUMNS else OF_HEADS), 1
    if tile == LARGE and timed:
        many = -(-m // LARGE.m) * -(-n // LARGE.n) >= _MANY_LARGE and not in_blocks
        if (rounded and not trans_b) or (splits == 1 and (trans_a or many)):
            return TWO_AT_ONCE, splits
    if tile == MEDIUM and timed:
        more = 2 * _MULTIPROCESSORS // (-(-m // TWO_AT_ONCE.m) * -(-n // TWO_AT_ONCE.n))
        if more > splits and k >= _LEAST_K_OF_SPLITS.get(more, k + 1):
            return TWO_AT_ONCE, more
    return chosen


def _wave_splits(tile: MatrixTile, m: int, n: int, k: int) -> int:
    """The number of splits with which a tile of k = 64 takes the least time, by a model.

    Workgroups run in waves, of which the last is seldom full; after eight waves that matters little. Each split is
    assumed to cost a 12th more. For NARROW this gives the fastest of all measured (bench/notes/tensor-cores.md).
    """
    at_once = _MULTIPROCESSORS * max(1, _SHARED_BYTES // (tile.workgroup_bytes(False, True) + _LEVELS))
    tiles = -(-m // tile.m) * -(-n // tile.n)
    most = min(k // _MIN_K_PER_SPLIT, _MAX_NARROW_SPLITS, 8 * at_once // tiles)
    counts = range(1, max(1, most) + 1)
    return min(counts, key=lambda splits: -(-tiles * splits // at_once) / splits * (1 + splits / 12))


def choose_weight_tile(
    m: int, n: int, k: int, weight: FrozenWeight | WeightForm, workgroup_bytes: int, lanes: int = 32
) -> tuple[MatrixTile, int]:
    """As `choose_tile`, for a weight that is decoded inside the GEMM."""
    if m <= NARROW.m:
        return NARROW, _wave_splits(NARROW, m, n, k)
    if lanes <= FEW_ROWS_LANES:
        few = (tile for tile in FEW_ROWS_TILES if m <= tile.m and tile.most_workgroup_bytes <= workgroup_bytes)
        if (found := next(few, None)) is not None:
            return found, _wave_splits(found, m, n, k)
    tiles = WEIGHT_TILES[unit_of(weight, m, lanes)]
    tile = next((tile for tile in tiles if m <= tile.m), tiles[-1])
    if tile.most_workgroup_bytes > workgroup_bytes:
        return choose_tile(m, n, k, 1, workgroup_bytes, "medium")
    groups = -(-m // tile.m) * -(-n // tile.n)
    splits = round(_WANTED_SUBGROUPS / (groups * tile.sg_m * tile.sg_n))
    return tile, max(1, min(splits, k // _MIN_K_PER_SPLIT, _MAX_SPLITS))


def unit_of(weight: FrozenWeight | WeightForm, m: int, lanes: int = 32, tile: MatrixTile | None = None) -> int:
    """Elements of the weight that an invocation decodes at once in a GEMM of m rows.

    With subgroups of 64 a tile has twice the invocations. tile: one of another table than WEIGHT_TILES.
    """
    if m <= NARROW.m or tile in FEW_ROWS_TILES:
        return widest_unit(weight, 32)
    return widest_unit(weight, 8 if weight.format == "nf4" or lanes > 32 else 16)
