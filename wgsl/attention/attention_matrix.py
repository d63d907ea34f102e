"""Tiles of the attention kernels on tensor cores (attention_matrix*.wgsl), and the choice among them.

Those of dk and dv, and of dq from stored ds: attention_matrix_keys.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from wgrad.device.memory import Array
from wgrad.wgsl.attention.attention_matrix_keys import PAD, PAIRED_LANES, MatrixKeys, MatrixStored
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.cooperative_shapes import BLOCK, Shape
from wgrad.wgsl.runtime.cooperative_text import constant_of

MOST_WIDTH = 128  # elements of a head: a subgroup keeps its queries and sums in registers


@dataclass(frozen=True)
class MatrixRows:
    """A workgroup's tile of the forward and dq: subgroups x 16 rows (queries), walked over tiles of `columns` keys.

    lanes: of a subgroup. With 8, two subgroups share 16 rows.
    pairs: two subgroups of 16 or 32 lanes share 32 rows, and each takes half of the columns, so that it reads half of a
        tile.
    in_turns: K and V of a tile share one place in workgroup memory. Forward only.
    own_strips: each subgroup has the strips of its rows to itself, and waits for itself between its scores and its
        weights, so that its softmax runs beside others' matmuls. Forward only, without pairs.
    least_groups: workgroups that the problem must have for this tile.
    """

    subgroups: int
    columns: int = 32
    lanes: int = 32
    shape: Shape = BLOCK  # of one cooperative matrix
    pairs: bool = False
    in_turns: bool = False
    own_strips: bool = False
    least_groups: int = field(default=0, compare=False)

    @property
    def rows(self) -> int:
        return 16 * self.subgroups

    @property
    def _sides(self) -> int:
        """Subgroups that share rows."""
        return 2 if self.lanes < 16 or self._blocks == 2 else 1

    @property
    def _blocks(self) -> int:
        """Blocks of 16 rows per subgroup."""
        return 2 if self.pairs else 1

    @property
    def _lanes_of_rows(self) -> int:
        """Invocations for 16 rows."""
        return self.lanes * self._sides // self._blocks

    @property
    def workgroup_subgroups(self) -> int:
        """Subgroups of a workgroup."""
        return self.subgroups * self._sides // self._blocks

    @property
    def _row_lanes(self) -> int:
        """Invocations that share a row."""
        return self._lanes_of_rows // 16

    def serves(self, lanes: int, subgroup_barrier: bool = False) -> bool:
        """Return whether subgroups of so many lanes may take this tile. subgroup_barrier: as of Runtime."""
        if self.own_strips and (lanes != 32 or not subgroup_barrier):
            return False
        return not self.pairs or lanes in PAIRED_LANES

    def _parts(self, width: int) -> int:
        """Parts of the head width, each of whole cooperative matrices, in which the workgroup's rows are staged in the
        tiles' memory before the walk: the fewest that fit."""
        divisors = [n for n in range(1, width // 16 + 1) if width // 16 % n == 0]
        return next((n for n in divisors if self._rows(width, n) <= self._tiles(width)), divisors[-1])

    def _rows(self, width: int, parts: int) -> int:
        """Elements of one part of the rows, in workgroup memory."""
        return self.rows * (width // parts + PAD)

    def _tiles(self, width: int) -> int:
        """Elements of the operands' tiles, in workgroup memory."""
        return (1 if self.in_turns else 2) * self.columns * (width + PAD)

    def _operands(self, width: int) -> int:
        return max(self._tiles(width), self._rows(width, self._parts(width)))

    def _scores(self, element: int) -> int:
        return element * (self.rows * (self.columns + PAD) - PAD)  # no padding after the last row

    def workgroup_bytes(self, kernel: str, width: int) -> int:
        """Workgroup memory of a kernel of TILES."""
        rest = {"forward": 32, "dq": 0}[kernel]
        return 2 * self._operands(width) + self._scores(4) + self._scores(2) + rest

    def constants(self, width: int) -> dict[str, Constant]:
        """Constants of attention_matrix.wgsl and attention_matrix_dq.wgsl, for heads of `width` elements."""
        parts, threads = self._parts(width), self._lanes_of_rows * self.subgroups
        return {
            "SG": self.subgroups,
            "BN": self.columns,
            "WIDTH": width,
            "W4": width // 4,
            "VEC": True,
            "TILE": self._operands(width) // 8,
            "LEFT_PARTS": parts,
            "LEFT_DF": width // 16 // parts,
            "NF": self.columns // 16,
            "OUT_PARTS": width // self.columns,
            "PAIRS": self.columns // 4 // self._row_lanes,
            "LANES": self.lanes,
            # 16-byte loads per invocation, of a part of the rows and of a tile
            "LOADS_ROWS": -(-self.rows * width // 8 // parts // threads),
            "LOADS_COLUMNS": -(-self.columns * width // 8 // threads),
            "SG_LANES": self._lanes_of_rows,
            "ROW_LANES": self._row_lanes,
            "NF_OWN": self.columns // 16 // self._sides,
            "SIDES": self._sides,
            "BLOCKS": self._blocks,
            "IN_TURNS": self.in_turns,
            "OWN_STRIPS": self.own_strips,
            **constant_of(self.shape),
        }


_EIGHT, _FOUR, _TWO = MatrixRows(8), MatrixRows(4), MatrixRows(2)
_EIGHT_PAIRED, _FOUR_PAIRED = replace(_EIGHT, pairs=True), replace(_FOUR, pairs=True)
_IN_TURNS = replace(_FOUR_PAIRED, in_turns=True)
_KEYS, _FEW_KEYS = MatrixKeys(8), MatrixKeys(4, pairs=False)
_KEYS_ALONE = replace(_KEYS, pairs=False)
_PAIRS_OF_KEYS = MatrixKeys(4, parts_of_heads=2.0, parts_of_queries=1.5)
_OWN_OF_MANY = replace(_EIGHT, own_strips=True, least_groups=2048)
_EIGHT_OF_MANY, _PAIRED_OF_MANY = replace(_EIGHT, least_groups=1024), replace(_EIGHT_PAIRED, least_groups=2048)
# By kernel, best first (measured on an H100, bench/notes/tensor-cores.md): the least width of a head, and the tile. Two
# workgroups of _FOUR_PAIRED run at once on a compute unit; for wide heads that takes _IN_TURNS. With so many workgroups
# that the last ones do not matter, eight subgroups are faster, and faster still where each waits for itself alone.
TILES: dict[str, tuple[tuple[int, MatrixRows | MatrixKeys], ...]] = {
    "forward": (
        *((128, _OWN_OF_MANY), (128, _PAIRED_OF_MANY), (128, _IN_TURNS), (96, _EIGHT_OF_MANY), (96, _IN_TURNS)),
        *((0, _FOUR_PAIRED), (0, _EIGHT), (0, _FOUR), (0, _TWO)),
    ),
    "dq": ((128, _EIGHT_PAIRED), (96, _EIGHT), (96, _FOUR), (0, _FOUR_PAIRED), (0, _FOUR), (0, _TWO)),
    # At least two workgroups of _PAIRS_OF_KEYS run at once on a compute unit; for heads of 128 they are too slow alone.
    # Subgroups of 64 lanes take tiles of 32 queries.
    "dkv": (
        *((96, _KEYS), (96, _KEYS_ALONE), (0, _PAIRS_OF_KEYS), (0, _KEYS_ALONE)),
        *((0, replace(_KEYS_ALONE, columns=32)), (0, _FEW_KEYS), (0, replace(_FEW_KEYS, columns=32))),
    ),
}
MOST_SUBGROUPS = 8  # of a workgroup of attention_matrix.wgsl
_FEW_ROWS = 64  # larger tiles are taken only where they fill the GPU


def stored_tile(width: int) -> MatrixStored:
    """Return the tile of dq from stored ds, for heads of `width` elements (measured on an H100)."""
    return MatrixStored(4, 4, columns=32 if width <= 64 else 16)


def served(
    kernel: str,
    workgroup_bytes: int,
    wanted_groups: int,
    *arrays: Array,
    lanes: int = 32,
    shape: Shape = BLOCK,
    many: bool = False,
    subgroup_barrier: bool = False,
) -> MatrixRows | MatrixKeys | None:
    """Choose the tile of a kernel of TILES, or None where tensor cores do not serve it.

    They serve float16, at least 16 queries, and D a multiple of 32 up to 128, if a tile fits.

    Args:
        arrays: q, k, v (and do) [B, T, H, D].
        wanted_groups: workgroups that fill the device.
        many: choose as for a problem of many workgroups.
        subgroup_barrier: as of Runtime.
    """
    batch, queries, heads, width = arrays[0].shape
    if any(a.dtype != np.float16 for a in arrays) or queries < 16 or width % 32 or width > MOST_WIDTH:
        return None
    rows = batch * heads * queries
    most_rows = max(_FEW_ROWS, rows // wanted_groups)
    tiles = (t for least, t in TILES[kernel] if least <= width and t.rows <= most_rows)
    tiles = (t for t in tiles if many or t.least_groups * t.rows <= rows)
    fitting = (t for t in tiles if t.workgroup_bytes(kernel, width) <= workgroup_bytes)
    fitting = (t for t in fitting if t.serves(lanes, subgroup_barrier))
    made = (replace(t, lanes=lanes, shape=shape) for t in fitting)
    return next((t for t in made if t.workgroup_subgroups <= MOST_SUBGROUPS), None)
