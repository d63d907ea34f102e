"""Products with a side of a LoRA's rank (gemm_skinny.py) on matrix units: which are served; their launch."""

from __future__ import annotations

import numpy as np

from wgrad.device.memory import Array
from wgrad.wgsl.gemm_skinny import Skinny
from wgrad.wgsl.runtime.runtime import Runtime

_COLUMNS = 32  # of X that a workgroup takes where the reduction runs along its rows
# Subgroups of a workgroup, and how much of the reduction each takes at a time; best first (measured on an H200).
_TILES = ((8, 64), (8, 32), (4, 32), (4, 16))


def choose_tile(product: Skinny, workgroup_bytes: int) -> tuple[int, int] | None:
    """Of _TILES; None where matrix units do not serve the product: X is float16, its sides are multiples of 16, and a
    tile for its rank fits."""
    rows, columns = product.x.shape
    if product.x.dtype != np.float16 or rows % 16 or columns % 16:
        return None
    return next((t for t in _TILES if _bytes_of(*t, product.rank) <= workgroup_bytes), None)


def _fragments(rank: int) -> int:
    """Cooperative matrices side by side that hold a rank."""
    return -(-rank // 16)


def _bytes_of(subgroups: int, depth: int, rank: int) -> int:
    return subgroups * (2 * 16 * _fragments(rank) * (depth + 8) * 2 + 16 * 16 * 4)


def launch(device: Runtime, product: Skinny, tile: tuple[int, int], out: Array, alpha: float, accumulate: bool) -> None:
    """out = alpha * product (+ out where `accumulate`)."""
    rows, columns = product.x.shape
    fragments, (subgroups, depth) = _fragments(product.rank), tile
    constants = product.constants(accumulate)
    constants |= {
        "SGS": subgroups,
        "KB": depth,
        "RF": fragments,
        "CF": _COLUMNS // 16 if product.along_rows else 1,
        "STEPS": depth // 16,
        "LOADS": 16 * fragments * depth // 4 // 32,
    }
    groups = -(-columns // _COLUMNS) if product.along_rows else rows // 16
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
