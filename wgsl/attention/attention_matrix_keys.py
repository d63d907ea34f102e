"""Tiles of attention's gradients on tensor cores: dk and dv, which may store ds, and dq from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.cooperative_shapes import BLOCK, Shape
from wgrad.wgsl.runtime.cooperative_text import constant_of

PAIRED_LANES = (16, 32)  # of a subgroup in a pair: with 8, two share rows anyway; 64 was not timed
PAD = 8  # elements after each row of a tile in workgroup memory


@dataclass(frozen=True)
class MatrixKeys:
    """A workgroup's tile of dk and dv: keys as rows, walked over tiles of `columns` queries.

    Two subgroups share 32 keys, one for the keys and dv, the other for the values and dk.

    pairs: they share 32 keys, not 16. That takes a subgroup twice the registers, and half as many loads.
    lanes: of a subgroup.
    parts_of_heads, parts_of_queries: with fewer workgroups than so many of those that fill the device, a group's heads
        are divided among workgroups, or a head's queries.
    """

    subgroups: int
    columns: int = 16
    pairs: bool = True
    lanes: int = 32
    shape: Shape = BLOCK  # of one cooperative matrix
    parts_of_heads: float = field(default=1.0, compare=False)
    parts_of_queries: float = field(default=1.0, compare=False)
    least_groups: ClassVar[int] = 0  # unlike MatrixRows, for problems of any size

    @property
    def _blocks(self) -> int:
        return 2 if self.pairs else 1

    @property
    def rows(self) -> int:
        return 8 * self.subgroups * self._blocks

    @property
    def workgroup_subgroups(self) -> int:
        return self.subgroups

    def serves(self, lanes: int, subgroup_barrier: bool = False) -> bool:
        """Return whether subgroups of so many lanes may take this tile: each lane needs a vec4 of the scores."""
        return (not self.pairs or lanes in PAIRED_LANES) and self.rows * self.columns // 4 >= self.subgroups * lanes

    def _parts(self, width: int) -> int:
        """Parts of the head width, each of whole cooperative matrices, in which keys and values are staged in the
        tiles' memory before the walk: the fewest that fit."""
        divisors = [n for n in range(1, width // 16 + 1) if width // 16 % n == 0]
        return next((n for n in divisors if self._rows(width, n) <= self._tiles(width)), divisors[-1])

    def _rows(self, width: int, parts: int) -> int:
        """Elements of one part of keys and values, in workgroup memory."""
        return 2 * self.rows * (width // parts + PAD)

    def _tiles(self, width: int) -> int:
        """Elements of a tile of q and one of do, in workgroup memory."""
        return 2 * self.columns * (width + PAD)

    def _operands(self, width: int) -> int:
        return max(self._tiles(width), self._rows(width, self._parts(width)))

    def workgroup_bytes(self, kernel: str, width: int) -> int:
        """Workgroup memory of the kernel, which is always that of dk and dv."""
        scores = 4 * self.columns + 2 * (self.columns + PAD)
        return 2 * self._operands(width) + 2 * self.rows * scores + 12 * self.columns

    def constants(self, width: int) -> dict[str, Constant]:
        """Constants of attention_matrix_dkv.wgsl, for heads of `width` elements."""
        threads, parts = self.lanes * self.subgroups, self._parts(width)
        return {
            "SG": self.subgroups,
            "BLOCKS": self._blocks,
            "BN": self.columns,
            "WIDTH": width,
            "W4": width // 4,
            "TILE": self._operands(width) // 8,
            "LEFT_PARTS": parts,
            "LEFT_DF": width // 16 // parts,
            "NF": self.columns // 16,
            "OUT_PARTS": width // self.columns,
            "LANES": self.lanes,
            "VECTORS": self.rows * self.columns // 4 // threads,
            # 16-byte loads per invocation, of a part of the rows and of a tile
            "LOADS_ROWS": -(-self.rows * width // 8 // parts // threads),
            "LOADS_COLUMNS": -(-self.columns * width // 8 // threads),
            **constant_of(self.shape),
        }

    def stored_rows(self, queries: int) -> int:
        """Rows of 16 elements of one head's ds: see attention_matrix.inc.wgsl, stored_at."""
        tiles = -(-queries // self.rows)
        return self.rows // 16 * self.rows * (tiles * (tiles + 1) // 2)


@dataclass(frozen=True)
class MatrixStored:
    """A workgroup's tile of dq from stored ds: queries as rows, walked over tiles of `columns` keys.

    Subgroups are in two columns, and each has row_blocks x 16 queries and half of the head width.
    """

    subgroups: int
    row_blocks: int
    columns: int
    lanes: int = 32
    shape: Shape = BLOCK  # of one cooperative matrix
    ahead: int = 3  # tiles in registers or being loaded

    @property
    def rows(self) -> int:
        return 8 * self.subgroups * self.row_blocks

    def workgroup_bytes(self, width: int) -> int:
        return 2 * self.columns * (self.rows + width + 2 * PAD) + 4 * 16 * self.subgroups * 24

    def constants(self, width: int) -> dict[str, Constant]:
        """Constants of attention_matrix_dq_stored.wgsl, for heads of `width` elements."""
        threads = self.lanes * self.subgroups
        return {
            "SG": self.subgroups,
            "AHEAD": self.ahead,
            "ROW_BLOCKS": self.row_blocks,
            "COLUMN_BLOCKS": width // 32,
            "BN": self.columns,
            "NF": self.columns // 16,
            "WIDTH": width,
            "W4": width // 4,
            "LANES": self.lanes,
            "VECTORS": 64 // self.lanes,
            "LOADS_DS": -(-self.columns * self.rows // 8 // threads),
            "LOADS_K": -(-self.columns * width // 8 // threads),
            **constant_of(self.shape),
        }
