"""Gradients of a LoRA term from one reading of dy, on tensor cores: tiles, their choice, and the launches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate

import numpy as np

from wgrad.device.memory import Array
from wgrad.wgsl.formats.formats import part_bounds
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.cooperative_text import constant_of
from wgrad.wgsl.runtime.dispatch_parts import range_parts
from wgrad.wgsl.runtime.runtime import Runtime

MOST_RANK = 16


@dataclass(frozen=True)
class LoraTile:
    """A workgroup's tile: `rounds` blocks of 16 `subgroups` rows, and 16 `across` columns of dy at a time.

    ahead: blocks that are loaded in advance, a divisor of `rounds`. flush: matrices of db that are added up at once, a
    divisor of `across`.
    """

    subgroups: int
    rounds: int
    across: int
    ahead: int
    flush: int
    lanes: int = field(default=32, compare=False)  # of a subgroup

    @property
    def rows(self) -> int:
        return 16 * self.subgroups * self.rounds

    @property
    def columns(self) -> int:
        return 16 * self.across

    @property
    def _block(self) -> int:
        """Units of 16 bytes of a block of dy, or of the pieces of u."""
        return 16 * self.subgroups * max(2 * self.across + 1, 6)

    @property
    def workgroup_bytes(self) -> int:
        return 16 * (self._block + 2 * 3 * self.columns + 64 * self.subgroups * self.flush)

    def constants(self) -> dict[str, Constant]:
        threads = self.lanes * self.subgroups
        return {
            "SGS": self.subgroups,
            "GROUPS": self.rounds // self.ahead,
            "AHEAD": self.ahead,
            "CF": self.across,
            "FLUSH": self.flush,
            "FLUSHES": self.across // self.flush,
            "BLOCK_SIZE": self._block,
            "X_LOADS": 32 * self.subgroups * self.across // threads,
            "U_LOADS": -(-32 * self.subgroups // threads),
            "B_LOADS": -(-2 * self.columns // threads),
            "ROUNDS": self.rounds,
            "LANES": self.lanes,
        }


# Of ten on an H100, 0.60 to 0.98 of the time of two GEMMs (bench/notes/lora-gradients.md). Two workgroups run at once.
TILE = LoraTile(4, 4, 4, 4, 2)
_AT_ONCE = 264  # workgroups
_OVERHEAD = 160  # columns that take as long as what a workgroup does besides


@lru_cache(maxsize=256)
def shares_of(tile: LoraTile, rows: int, parts: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Choose the columns of a share, so that the last workgroups to run leave little of the GPU idle.

    Returns:
        The columns, and the first share of each part, and the end.
    """
    blocks = -(-rows // tile.rows)

    def cost(share: int) -> int:
        groups = blocks * sum(-(-part // share) for part in parts)
        return -(-groups // _AT_ONCE) * (share + _OVERHEAD)

    share = min(range(tile.columns, max(parts) + tile.columns, tile.columns), key=cost)
    return share, (0, *accumulate(-(-part // share) for part in parts))


def served(device: Runtime, dy: Array, b: Array) -> bool:
    """Return whether this serves dy [rows, columns] and b [columns, rank] on a device."""
    (_, columns), rank = dy.shape, b.shape[1]
    return (
        device.matrix_units
        and dy.dtype == np.float16
        and columns % 16 == 0
        and rank <= MOST_RANK
        and rank % 4 == 0
        and TILE.workgroup_bytes <= device.workgroup_bytes
    )


def launch(
    device: Runtime,
    dy: Array,
    b: Array,
    u: Array,
    parts: tuple[int, ...],
    alpha: float,
    du: Array,
    db: Array,
    accumulate: bool,
) -> None:
    """du = alpha dy b for each part, and db = dy^T u (+ db where `accumulate`).

    What the second launch adds up takes at most half of dy's memory each.
    """
    (rows, columns), rank = dy.shape, b.shape[1]
    parts = parts or (columns,)
    tile = replace(TILE, lanes=device.lanes)
    share, all_starts = shares_of(tile, rows, parts)
    shares, blocks = all_starts[-1], -(-rows // tile.rows)
    starts = [*all_starts[1:-1], shares, shares][:2]
    of_shares, of_blocks = device.empty((shares, rows, rank)), device.empty((blocks, columns, rank))
    constants = {**tile.constants(), "SUBGROUP_BARRIER": device.subgroup_barrier, **constant_of(device.matrix_shape)}
    bounds = part_bounds(parts, columns)
    work = 4.0 * rows * columns * rank
    for first, end in range_parts(blocks, work, device.dispatch_work):
        sizes = [rows, columns, rank, u.shape[1], *bounds, *starts, share, first, 0]
        groups = (shares, end - first, 1)
        device.launch(
            "gemm_matrix_lora",
            [dy, b, u, of_shares, of_blocks],
            sizes,
            groups,
            constants,
            work=work * (end - first) / blocks,
        )
    params: list[int | float] = [rows, columns, rank, u.shape[1], *starts, shares, blocks, float(alpha)]
    count = (du.size + db.size) // 4
    device.launch(
        "gemm_matrix_lora_reduce",
        [of_shares, of_blocks, du, db],
        params,
        device.groups(count, 256),
        {"ACCUMULATE": accumulate},
        work=float(of_shares.size + of_blocks.size),
    )
