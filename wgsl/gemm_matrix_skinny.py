"""Products with a side of a LoRA's rank (gemm_skinny.py) on matrix units: which are served; their launch."""

from __future__ import annotations

import numpy as np

from wgrad.device.memory import Array
from wgrad.wgsl.gemm_skinny import Skinny
from wgrad.wgsl.runtime.runtime import Runtime

# Subgroups of a workgroup, and how much of the reduction each takes at a time; best first (measured on an H200).
_TILES = ((8, 32), (8, 16), (4, 32), (4, 16), (2, 16))
_WANTED_GROUPS = 128  # about as many as a large card has compute units


def choose_tile(product: Skinny, workgroup_bytes: int) -> tuple[int, int] | None:
    """Of _TILES; None where matrix units do not serve the product: X is float16, its sides are multiples of 16, and a
    tile for its rank fits."""
    rows, columns = product.x.shape
    if product.x.dtype != np.float16 or rows % 16 or columns % 16:
        return None
    return next((t for t in _TILES if _bytes_of(*t, product) <= workgroup_bytes), None)


def _vectors(product: Skinny) -> bool:
    """Whether S is read four numbers at a time."""
    return not (product.s.shape[1] | product.first_rank | product.part_rank) % 4


def _by_steps(product: Skinny) -> bool:
    return product.rank_inner and _vectors(product)


def _fragments(rank: int) -> int:
    """Cooperative matrices side by side that hold a rank."""
    return -(-rank // 16)


def _across(product: Skinny) -> int:
    """Cooperative matrices of X, side by side, that a workgroup multiplies by what it reads of S: as many as leave
    enough workgroups; where X is staged, of a small rank no more than two."""
    side = product.x.shape[1 if product.along_rows else 0]
    most = 4 if product.along_rows or product.rank > 16 else 2
    return next((n for n in (4, 2) if n <= most and side // (16 * n) * product.parts_along_y >= _WANTED_GROUPS), 1)


def _bytes_of(subgroups: int, depth: int, product: Skinny) -> int:
    """Of the pieces of S, a staged block of X, whose rows are padded by 16 bytes, and the sums."""
    rank = 16 * _fragments(product.rank)
    pieces = depth * (rank + 8) if _by_steps(product) else rank * (depth + 8)
    block = 0 if product.along_rows else 16 * _across(product) * (depth + 8)
    return subgroups * (2 * 2 * pieces + 2 * block + 16 * 16 * 4)


def launch(device: Runtime, product: Skinny, tile: tuple[int, int], out: Array, alpha: float, accumulate: bool) -> None:
    """out = alpha * product (+ out where `accumulate`)."""
    rows, columns = product.x.shape
    fragments, (subgroups, depth) = _fragments(product.rank), tile
    across = _across(product)
    constants = product.constants(accumulate)
    constants |= {
        "SGS": subgroups,
        "KB": depth,
        "RF": fragments,
        "CF": across,
        "VEC_S": _vectors(product),
        "BY_STEPS": _by_steps(product),
        "STEPS": depth // 16,
        "S_LOADS": 16 * fragments * depth // 8 // 32,
        "X_LOADS": 16 * across * depth // 8 // 32,
    }
    groups = -(-(columns if product.along_rows else rows) // (16 * across))
    params = product.parameters(out, alpha)
    work = 2.0 * rows * columns * product.rank
    device.launch(
        "gemm_matrix_skinny",
        [product.x, product.s, out],
        params,
        (groups, product.parts_along_y, 1),
        constants,
        work=work,
    )
