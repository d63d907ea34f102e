"""GEMM with a side of a LoRA's rank (gemm_skinny.py) on tensor cores: tiles, their choice, and the launch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from wgrad.device.memory import Array
from wgrad.wgsl.gemm.gemm_epilogue import Epilogue, reduce_splits
from wgrad.wgsl.gemm.gemm_skinny import MOST_RANK, Skinny, launch_along_x
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.cooperative_text import constant_of
from wgrad.wgsl.runtime.dispatch_parts import range_parts
from wgrad.wgsl.runtime.runtime import Runtime


@dataclass(frozen=True)
class SkinnyTile:
    """A workgroup's tile.

    Of its `subgroups`, `groups` are side by side along X, each with `across` cooperative matrices. The others share the
    steps of a block of `depth`. ahead: blocks that are loaded in advance.
    """

    subgroups: int
    groups: int
    across: int
    depth: int
    ahead: int
    lanes: int = field(default=32, compare=False)  # of a subgroup

    def for_lanes(self, lanes: int) -> SkinnyTile:
        """The same tile in subgroups of `lanes`, in so few that every invocation has a load of a block."""
        tile = replace(self, lanes=lanes)
        while tile.side * tile.depth % (8 * lanes * tile.subgroups):
            tile = replace(tile, subgroups=tile.subgroups // 2)
        assert tile.subgroups >= tile.groups, "each group has a subgroup"
        return tile

    @property
    def side(self) -> int:
        """Rows or columns of X."""
        return 16 * self.groups * self.across

    def workgroup_bytes(self, product: Skinny) -> int:
        """Workgroup memory of the two pieces of S and a block of X, whose rows are padded by 16 bytes, and the sums."""
        rank = 16 * _fragments(product.rank)
        pieces = self.depth * (rank + 8) if _by_steps(product) else rank * (self.depth + 8)
        block = self.depth * (self.side + 8) if product.along_rows else self.side * (self.depth + 8)
        return 2 * 2 * pieces + 2 * block + self.subgroups * 16 * 16 * 4

    def constants(self, fragments: int) -> dict[str, Constant]:
        threads = self.lanes * self.subgroups
        assert self.side * self.depth % (8 * threads) == 0, "every invocation reads as much of X"
        return {
            "SGS": self.subgroups,
            "GROUPS": self.groups,
            "CF": self.across,
            "KB": self.depth,
            "AHEAD": self.ahead,
            "RF": fragments,
            "STEPS": self.depth // 16 // (self.subgroups // self.groups),
            "S_LOADS": -(-2 * fragments * self.depth // threads),
            "X_LOADS": self.side * self.depth // 8 // threads,
            "LANES": self.lanes,
        }


# Measured on an H200, where each compute unit runs two workgroups of _NARROW (23 KB) at once and one of _WIDE.
_NARROW, _WIDE = SkinnyTile(8, 2, 2, 64, 2), SkinnyTile(8, 4, 2, 64, 2)  # for one cooperative matrix of ranks, for more
_WANTED = {_NARROW: 256, _WIDE: 128}  # workgroups; the reduction is split until there are about as many
_MOST_SPLITS = 16
# Elements of X times fragments of the rank from which a second launch, which adds the shares, pays.
_MUCH = 1 << 23
# Without splits: few rows or columns per workgroup, and as deep a block as fits.
_WHOLE = (SkinnyTile(16, 1, 1, 256, 1), SkinnyTile(8, 1, 1, 256, 1), SkinnyTile(8, 1, 1, 128, 1))
_WHOLE_WIDE = (SkinnyTile(8, 1, 2, 128, 2),)
_ENOUGH = 160  # workgroups of _WHOLE, from which on those of _WHOLE_WIDE are taken
# For little workgroup memory.
_SMALL = (SkinnyTile(4, 2, 2, 64, 2), SkinnyTile(4, 1, 1, 64, 1), SkinnyTile(2, 1, 1, 32, 1))


def choose_tile(product: Skinny, workgroup_bytes: int, lanes: int = 32) -> SkinnyTile | None:
    """Choose the tile, or None where tensor cores do not serve the GEMM.

    They serve X in float16 with sides that are multiples of 16, if a tile for the rank fits. A workgroup's columns of a
    stack belong to one part.
    """
    rows, columns = product.x_shape
    if product.x_dtype != "float16" or rows % 16 or columns % 16:
        return None
    bounds = product.parts if product.along_rows else ()
    tiles = (t.for_lanes(lanes) for t in _tiles(product))
    fitting = (t for t in tiles if t.workgroup_bytes(product) <= workgroup_bytes)
    return next((t for t in fitting if all(part % t.side == 0 for part in bounds)), None)


def _tiles(product: Skinny) -> tuple[SkinnyTile, ...]:
    """Best first."""
    fragments = _fragments(product.rank)
    if product.x_shape[0] * product.x_shape[1] * fragments >= _MUCH:
        return (_WIDE if fragments > 1 else _NARROW, *_SMALL)
    many = _side(product) // 16 * product.parts_along_y >= _ENOUGH
    return (*(_WHOLE_WIDE if many else ()), *_WHOLE, *_SMALL)


def _side(product: Skinny) -> int:
    return product.x_shape[1 if product.along_rows else 0]


def _vectors(product: Skinny) -> bool:
    """Return whether S is read four numbers at a time."""
    return not (product.s_columns | product.first_rank | product.part_rank) % 4


def _by_steps(product: Skinny) -> bool:
    return product.rank_inner and _vectors(product)


def _fragments(rank: int) -> int:
    """Cooperative matrices side by side that hold a rank."""
    return -(-rank // 16)


def splits_of(product: Skinny, tile: SkinnyTile) -> tuple[int, int]:
    """Number of shares of the reduction (a power of two for the longest part), and their length.

    The launch of a slice of the ranks is not split: its sums would lie between those of others.
    """
    rows, columns = product.x_shape
    whole = rows if product.along_rows else columns
    longest = max(product.parts) if product.parts and not product.along_rows else whole
    wanted = _WANTED.get(tile, 0) if product.part_rank in (0, product.rank) else 0
    most = min(_MOST_SPLITS, longest * wanted // (whole * -(-_side(product) // tile.side)))
    length = -(-longest // (1 << max(most, 1).bit_length() - 1) // tile.depth) * tile.depth
    return -(-longest // length), length


def groups(product: Skinny, tile: SkinnyTile, splits: int) -> tuple[int, int, int]:
    """Workgroups along the side of X that is not reduced, along the parts, and along the shares."""
    return -(-_side(product) // tile.side), product.parts_along_y, splits


def launch(
    device: Runtime,
    product: Skinny,
    tile: SkinnyTile,
    x: Array,
    s: Array,
    out: Array,
    alpha: float,
    accumulate: bool,
) -> None:
    """out = alpha * product (+ out where `accumulate`)."""
    splits, length = splits_of(product, tile)
    constants = product.constants(accumulate) | tile.constants(_fragments(product.rank))
    constants |= {"VEC_S": _vectors(product), "BY_STEPS": _by_steps(product), "SPLIT": splits > 1}
    constants |= {"EXPERTS": False, "GATHER": False}
    constants |= constant_of(device.matrix_shape)
    target = device.empty((splits, *out.shape)) if splits > 1 else out
    tiles = groups(product, tile, splits)
    launch_along_x(device, "gemm_matrix_skinny", [x, s, target], product, out, alpha, length, tiles, constants)
    if splits > 1:
        reduce_splits(device, target, Epilogue(out, alpha, accumulate=accumulate), (out.shape[0], out.shape[1], splits))


# Of gradients of experts: workgroups that are wanted, and rows of an expert, on average, of each of its shares.
_WANTED_OF_EXPERTS, _LEAST_ROWS_OF_SHARE = 256, 256


def expert_tile(device: Runtime, x: Array, s: Array, *, along_rows: bool, rank_inner: bool = True) -> SkinnyTile | None:
    """Return the tile of a GEMM of each expert's rows of x with the small s, or None: tensor cores do not serve it.

    along_rows: s^T x, with s [rows, rank]. Otherwise s has a matrix for each expert, [columns, rank] if `rank_inner`.
    """
    columns, rank = x.shape[1], s.shape[-1 if rank_inner else -2]
    if not device.matrix_units or x.dtype != np.float16 or s.dtype != np.float32:
        return None
    if columns % 8 or rank > MOST_RANK or (along_rows and rank % 4):
        return None
    product = Skinny(x.shape, "float16", s.shape[-1], rank, rank_inner, along_rows)
    first = _WIDE if _fragments(rank) > 1 else _NARROW  # of eight on an H100 (bench/notes/experts.md)
    tiles = (tile.for_lanes(device.lanes) for tile in (first, *_SMALL))
    return next((tile for tile in tiles if tile.workgroup_bytes(product) <= device.workgroup_bytes), None)


def _expert_constants(
    device: Runtime, product: Skinny, tile: SkinnyTile, order: Array | None, **more: bool
) -> dict[str, Constant]:
    found = product.constants(False) | tile.constants(_fragments(product.rank)) | constant_of(device.matrix_shape)
    found |= {"VEC_S": _vectors(product), "BY_STEPS": _by_steps(product), "SPLIT": False}
    return found | {"EXPERTS": True, "GATHER": order is not None, **more}


def launch_gradients(
    device: Runtime,
    tile: SkinnyTile,
    x: Array,
    s: Array,
    out: Array,
    start: Array,
    order: Array | None,
    alpha: float,
    *,
    transposed: bool,
    accumulate: bool,
) -> None:
    """out [experts, rank, columns] = alpha s^T x of each expert's rows (+ out), or [experts, columns, rank].

    x: [rows, columns], or with `order` [rows / chosen, columns]. s: [rows, rank].
    """
    (rows, rank), columns, experts = s.shape, x.shape[1], out.shape[0]
    product = Skinny((rows, columns), "float16", rank, rank, True, True, transposed)
    tiles = -(-columns // tile.side)
    wanted = _WANTED_OF_EXPERTS // (tiles * experts)
    shares = max(1, min(_MOST_SPLITS, wanted, rows // (experts * _LEAST_ROWS_OF_SHARE)))
    constants = _expert_constants(device, product, tile, order, ACCUMULATE=accumulate, SPLIT=shares > 1)
    target = device.empty((shares, *out.shape)) if shares > 1 else out
    sizes = [rows, columns, rank, rank, out.shape[2], 0, rows // x.shape[0], shares, 0, 0, float(alpha), 0, out.size]
    _launch_tiles(device, [x, s, target, start, order], sizes, (tiles, experts, shares), constants, rows)
    if shares > 1:
        mns = (experts * out.shape[1], out.shape[2], shares)
        reduce_splits(device, target, Epilogue(out, alpha, accumulate=accumulate), mns)


def launch_rows(
    device: Runtime,
    tile: SkinnyTile,
    x: Array,
    s: Array,
    out: Array,
    start: Array,
    order: Array | None,
    alpha: float,
    *,
    rank_inner: bool,
) -> None:
    """out [rows, rank] = alpha x s^T, with the matrix of each row's expert; with `rank_inner`, x s.

    x: as in `launch_gradients`. s: [experts, rank, columns], or with `rank_inner` [experts, columns, rank].
    """
    (rows, rank), columns, experts = out.shape, x.shape[1], s.shape[0]
    product = Skinny((rows, columns), "float16", s.shape[2], rank, rank_inner, False)
    constants = _expert_constants(device, product, tile, order)
    of_expert = columns * rank if rank_inner else rank
    sizes = [rows, columns, rank, s.shape[2], rank, 0, rows // x.shape[0], experts, 0, 0, float(alpha), 0, of_expert]
    groups = (rows // tile.side + experts, 1, 1)
    _launch_tiles(device, [x, s, out, start, order], sizes, groups, constants, rows)


def _launch_tiles(
    device: Runtime,
    arrays: list[Array | None],
    params: list[int | float],
    groups: tuple[int, int, int],
    constants: dict[str, Constant],
    rows: int,
) -> None:
    """Launch workgroups in as many dispatches as `Runtime.dispatch_work` asks for; first_tile comes last."""
    (tiles, y, z), work = groups, 2.0 * rows * params[1] * params[2]
    for first, end in range_parts(tiles, work, device.dispatch_work):
        size, share = (end - first, y, z), (end - first) / tiles
        device.launch("gemm_matrix_skinny", arrays, [*params, first], size, constants, work=work * share)
