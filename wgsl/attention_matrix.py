"""Attention on matrix units (attention_matrix*.wgsl): which of it is served, and by what tile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wgrad.device.memory import Array
from wgrad.wgsl.runtime.compile import Constant

_PAD = 2  # vec4 after each row of a tile in workgroup memory
MOST_WIDTH = 128  # what a subgroup keeps of a query, and of its sums, stands in registers


@dataclass(frozen=True)
class MatrixRows:
    """subgroups x 16 rows (queries; in dk and dv keys) of a workgroup, which walks tiles of `columns`."""

    subgroups: int
    columns: int = 32

    @property
    def rows(self) -> int:
        return 16 * self.subgroups

    def _operands(self, width: int) -> int:
        """Bytes of two operand tiles; before the walk begins the rows pass through them."""
        return 8 * max(self.rows, 2 * self.columns) * (width // 4 + _PAD)

    def _scores(self, element: int) -> int:
        return element * self.rows * (self.columns + 4 * _PAD)

    def workgroup_bytes(self, width: int) -> int:
        """Of attention_matrix_dkv.wgsl, which takes most."""
        return self._operands(width) + 2 * self._scores(4) + 2 * self._scores(2) + 12 * self.columns

    def constants(self, width: int) -> dict[str, Constant]:
        """What attention_matrix.wgsl and attention_matrix_dq.wgsl call it, for heads of `width` elements."""
        loads = width // 4 * self.rows // (32 * self.subgroups)
        return {
            "SG": self.subgroups,
            "BN": self.columns,
            "WIDTH": width,
            "W4": width // 4,
            "VEC": True,
            "TILE_ROWS": max(self.rows, 2 * self.columns),
            "DF": width // 16,
            "NF": self.columns // 16,
            "OUT_PARTS": width // self.columns,
            "PAIRS": self.columns // 8,
            "LOADS_ROWS": loads,
            "LOADS_COLUMNS": loads * self.columns // self.rows,
        }

    def key_constants(self, width: int) -> dict[str, Constant]:
        """What attention_matrix_dkv.wgsl calls it: twice the subgroups, which share rows."""
        loads = width // 4 * self.rows // (64 * self.subgroups)
        own = {
            "HALF_NF": self.columns // 32,
            "QUARTER": self.columns // 16,
            "LOADS_ROWS": loads,
            "LOADS_COLUMNS": loads * self.columns // self.rows,
        }
        return {**self.constants(width), **own}


# Best first, measured on an H200: 64 rows for 48 KiB of workgroup memory, 32 for less.
TILES = (MatrixRows(4), MatrixRows(2))


def tile(width: int, workgroup_bytes: int) -> MatrixRows | None:
    """The tile for heads of `width`, or None where none fits `workgroup_bytes`."""
    return next((t for t in TILES if t.workgroup_bytes(width) <= workgroup_bytes), None)


def served(workgroup_bytes: int, *arrays: Array) -> MatrixRows | None:
    """The tile for attention on q, k, v (and do) [B, T, H, D], or None: all float16, at least 16 queries, D a multiple
    of 32 up to 128."""
    _, queries, _, width = arrays[0].shape
    if any(a.dtype != np.float16 for a in arrays) or queries < 16 or width % 32 or width > MOST_WIDTH:
        return None
    return tile(width, workgroup_bytes)
