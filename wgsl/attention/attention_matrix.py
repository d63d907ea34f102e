"""Attention on matrix units (attention_matrix*.wgsl): which of it is served, and by what tile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wgrad.device.memory import Array
from wgrad.wgsl.runtime.compile import Constant

_PAD = 8  # elements after each row of a tile in workgroup memory
MOST_WIDTH = 128  # what a subgroup keeps of a query, and of its sums, stands in registers


@dataclass(frozen=True)
class MatrixRows:
    """subgroups x 16 rows (queries; in dk and dv keys) of a workgroup, which walks tiles of `columns`."""

    subgroups: int
    columns: int = 32

    @property
    def rows(self) -> int:
        return 16 * self.subgroups

    def _parts(self, width: int) -> int:
        """Parts of the columns, of at least 16, in which the rows pass through the place of the tiles before the walk
        begins: as few as go there."""
        return next((n for n in (1, 2) if self._rows(width, n) <= self._tiles(width)), min(4, width // 16))

    def _rows(self, width: int, parts: int) -> int:
        """Elements of a part of the rows, in workgroup memory."""
        return self.rows * (width // parts + _PAD)

    def _tiles(self, width: int) -> int:
        """Elements of two operand tiles, in workgroup memory."""
        return 2 * self.columns * (width + _PAD)

    def _operands(self, width: int) -> int:
        return max(self._tiles(width), self._rows(width, self._parts(width)))

    def _scores(self, element: int) -> int:
        return element * self.rows * (self.columns + _PAD)

    def workgroup_bytes(self, kernel: str, width: int) -> int:
        """Return the constants of a kernel of TILES."""
        scores, rest = {"forward": (1, 32), "dq": (1, 0), "dkv": (2, 12 * self.columns)}[kernel]
        return 2 * self._operands(width) + scores * (self._scores(4) + self._scores(2)) + rest

    def constants(self, width: int) -> dict[str, Constant]:
        """Constants of attention_matrix.wgsl and attention_matrix_dq.wgsl, for heads of `width` elements."""
        return {**self._shape(width), **self._loads(width, 32 * self.subgroups)}

    def key_constants(self, width: int) -> dict[str, Constant]:
        """Constants of attention_matrix_dkv.wgsl: twice the subgroups, which share rows."""
        own = {"HALF_NF": self.columns // 32, "QUARTER": self.columns // 16}
        return {**self._shape(width), **self._loads(width, 64 * self.subgroups), **own}

    def _shape(self, width: int) -> dict[str, Constant]:
        return {
            "SG": self.subgroups,
            "BN": self.columns,
            "WIDTH": width,
            "W4": width // 4,
            "VEC": True,
            "TILE": self._operands(width) // 8,
            "LEFT_PARTS": self._parts(width),
            "LEFT_DF": width // 16 // self._parts(width),
            "NF": self.columns // 16,
            "OUT_PARTS": width // self.columns,
            "PAIRS": self.columns // 8,
        }

    def _loads(self, width: int, threads: int) -> dict[str, Constant]:
        """Number of 16-byte loads by an invocation: of a part of the rows, and of a tile, of which it may read some
        twice."""
        return {
            "LOADS_ROWS": self.rows * width // 8 // self._parts(width) // threads,
            "LOADS_COLUMNS": -(-self.columns * width // 8 // threads),
        }


# By kernel, best first (measured on an H200): the least width of a head, and the tile.
TILES = {
    "forward": ((0, MatrixRows(8)), (0, MatrixRows(4)), (0, MatrixRows(2))),
    "dq": ((96, MatrixRows(8)), (0, MatrixRows(4)), (0, MatrixRows(2))),
    "dkv": ((0, MatrixRows(4)), (0, MatrixRows(2))),
}
_FEW_ROWS = 64  # tiles of more are for as many queries as fill a card with them


def served(kernel: str, workgroup_bytes: int, wanted_groups: int, *arrays: Array) -> MatrixRows | None:
    """The tile of a kernel of TILES for q, k, v (and do) [B, T, H, D], or None: where they are not all float16, of at
    least 16 queries, D a multiple of 32 up to 128, or no tile fits. wanted_groups: workgroups that fill the device."""
    batch, queries, heads, width = arrays[0].shape
    if any(a.dtype != np.float16 for a in arrays) or queries < 16 or width % 32 or width > MOST_WIDTH:
        return None
    most_rows = max(_FEW_ROWS, batch * heads * queries // wanted_groups)
    tiles = (t for least, t in TILES[kernel] if least <= width and t.rows <= most_rows)
    return next((t for t in tiles if t.workgroup_bytes(kernel, width) <= workgroup_bytes), None)
