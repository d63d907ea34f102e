"""Products with a side of a LoRA's rank, on matrix units (gemm_matrix_skinny.wgsl): which are served; their launch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wgrad.device.memory import Array
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime

MOST_RANK = 64
_COLUMNS = 32  # of X that a workgroup takes where the reduction runs along its rows
# Subgroups of a workgroup, and how much of the reduction each takes at a time; best first (measured on an H200).
_TILES = ((8, 64), (8, 32), (4, 32), (4, 16))


@dataclass(frozen=True)
class Skinny:
    """x: the float16 operand. s: the float32 one; its rows run along the rank where `rank_inner`. along_rows: the
    reduction runs along the rows of x; then the result is written transposed where `transposed`. tile: of _TILES."""

    x: Array
    s: Array
    rank: int
    rank_inner: bool
    along_rows: bool
    tile: tuple[int, int]
    transposed: bool = False


def served(
    a: Array, b: Array, out: Array, mnk: tuple[int, int, int], trans_a: bool, trans_b: bool, workgroup_bytes: int
) -> Skinny | None:
    """What kind of such a product op(a) op(b) is, or None. Its float16 operand has sides that are multiples of 16, and
    a tile for its rank fits `workgroup_bytes`."""
    m, n, _ = mnk
    from_right = n <= min(m, MOST_RANK) and a.dtype == np.float16 and b.dtype == np.float32
    from_left = m <= MOST_RANK and not trans_b and a.dtype == np.float32 and b.dtype == np.float16
    if out.dtype != np.float32 or not (from_right or from_left):
        return None
    x, rank = (a, n) if from_right else (b, m)
    tile = next((t for t in _TILES if _bytes_of(*t, rank) <= workgroup_bytes), None)
    if tile is None or x.shape[0] % 16 or x.shape[1] % 16:
        return None
    if from_right:
        return Skinny(a, b, rank, not trans_b, trans_a, tile, transposed=True)
    return Skinny(b, a, rank, trans_a, True, tile)


def _fragments(rank: int) -> int:
    """Cooperative matrices side by side that hold a rank."""
    return -(-rank // 16)


def _bytes_of(subgroups: int, depth: int, rank: int) -> int:
    return subgroups * (2 * 16 * _fragments(rank) * (depth + 8) * 2 + 16 * 16 * 4)


def launch(device: Runtime, product: Skinny, out: Array, alpha: float, accumulate: bool) -> None:
    """out = alpha * product (+ out where `accumulate`)."""
    rows, columns = product.x.shape
    fragments = _fragments(product.rank)
    subgroups, depth = product.tile
    constants: dict[str, Constant] = {
        "SGS": subgroups,
        "KB": depth,
        "RF": fragments,
        "CF": _COLUMNS // 16 if product.along_rows else 1,
        "STEPS": depth // 16,
        "LOADS": 16 * fragments * depth // 4 // 32,
        "TN": product.along_rows,
        "RANK_INNER": product.rank_inner,
        "C_TRANS": product.transposed,
        "ACCUMULATE": accumulate,
    }
    groups = -(-columns // _COLUMNS) if product.along_rows else rows // 16
    params = [rows, columns, product.rank, 0, float(alpha)]
    work = 2.0 * rows * columns * product.rank
    device.launch("gemm_matrix_skinny", [product.x, product.s, out], params, (groups, 1, 1), constants, work=work)
