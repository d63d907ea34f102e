"""Tiles of the attention kernels, by head width and workgroup memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wgrad.wgsl.runtime.compile import Constant

VEC4_BYTES = 16


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Tile:
    """One kernel's tile. A workgroup of tx x ty invocations owns `rows` and walks tiles of `columns`.

    rows, columns: multiples of 4 ty and 4 tx.
    depth: columns of D staged at a time (a multiple of 4) for the matmuls over D.
    flat: whole rows staged at a time (a multiple of 4 that divides `columns`) for the matmuls over `columns`.
    resident: the forward's queries stay in workgroup memory instead of being read again for each tile.
    """

    rows: int
    columns: int
    tx: int
    ty: int
    depth: int
    flat: int
    resident: bool = False

    def __post_init__(self) -> None:
        if self.rows % (4 * self.ty) or self.columns % (4 * self.tx):
            raise ValueError(f"{self}: rows must be a multiple of 4 ty and columns of 4 tx")
        if self.depth % 4 or self.flat % 4 or self.columns % self.flat:
            raise ValueError(f"{self}: depth and flat must be multiples of 4, and flat must divide columns")

    @property
    def threads(self) -> int:
        return self.tx * self.ty

    def _staged(self, rows: int) -> int:
        """Bytes of `rows` rows of one chunk of D, padded against bank conflicts."""
        return rows * (self.depth // 4 | 1) * VEC4_BYTES

    def _shared(self, width: int) -> int:
        scores = self.rows * (self.columns // 4 + 1) * VEC4_BYTES
        return scores + self.flat * ceil_div(ceil_div(width, 4), self.tx) * self.tx * VEC4_BYTES

    def forward_bytes(self, width: int) -> int:
        """Workgroup memory of attention.wgsl."""
        chunks = ceil_div(width, self.depth) if self.resident else 1
        queries = self.rows * (chunks * (self.depth // 4) + 1) * VEC4_BYTES
        return queries + self._staged(self.columns) + self._shared(width) + self.rows * (self.tx + 1) * 4

    def backward_bytes(self, width: int) -> int:
        """Workgroup memory of attention_backward_dkv.wgsl, the larger of the two."""
        return 2 * self._staged(self.rows) + 2 * self._staged(self.columns) + self._shared(width) + 12 * self.columns

    def constants(self, width: int) -> dict[str, Constant]:
        """Constants of the shaders' tile, for heads of `width` elements."""
        depth4, width4 = self.depth // 4, ceil_div(width, 4)
        chunks = ceil_div(width, self.depth)
        rm, rn, rd = self.rows // self.ty, self.columns // self.tx, ceil_div(width4, self.tx)
        row_loads = ceil_div(self.rows * depth4, self.threads)
        column_loads = ceil_div(self.columns * depth4, self.threads)
        flat_loads = ceil_div(self.flat * rd * self.tx, self.threads)
        return {
            "BM": self.rows,
            "BN": self.columns,
            "BN4": self.columns // 4,
            "TX": self.tx,
            "TY": self.ty,
            "RM": rm,
            "RM4": rm // 4,
            "RN": rn,
            "RN4": rn // 4,
            "RD": rd,
            "SCORES": rm * rn // 4,
            "ACC": rm * rd,
            "DC4": depth4,
            "DC4_PADDED": depth4 | 1,
            "ND": chunks,
            "Q_RESIDENT": self.resident,
            "Q_CHUNKS": chunks if self.resident else 1,
            "VN": self.flat,
            "VN4": self.flat // 4,
            "NV": self.columns // self.flat,
            "LOADS_ROWS": row_loads,
            "LOADS_COLUMNS": column_loads,
            "LOADS_FLAT": flat_loads,
            "WIDTH": width,
            "W4": width4,
            "VEC": width % 4 == 0,
        }


@dataclass(frozen=True)
class Plan:
    """Tiles of one head width, and how many workgroups a dispatch should have before work is no longer split."""

    forward: Tile
    dq: Tile
    dkv: Tile
    wanted_groups: int = 256


# Best first; the first that fits the device's workgroup memory is taken. The last of each fits 16 KiB at that width.
FORWARD = {
    64: (
        Tile(64, 64, 8, 16, 16, 16, resident=True),
        Tile(64, 64, 16, 8, 16, 16),
        Tile(32, 32, 8, 8, 16, 16),
        Tile(32, 32, 8, 8, 16, 4),
    ),
    128: (Tile(64, 64, 16, 16, 16, 16), Tile(32, 64, 16, 8, 16, 8), Tile(32, 32, 8, 8, 16, 4)),
    256: (Tile(32, 64, 16, 8, 16, 8), Tile(32, 64, 16, 8, 16, 4), Tile(32, 32, 8, 8, 16, 4)),
    512: (Tile(32, 128, 32, 8, 4, 4), Tile(16, 64, 16, 4, 4, 4)),
}
BACKWARD = {
    64: (Tile(64, 64, 16, 8, 16, 16), Tile(32, 32, 8, 8, 16, 8), Tile(32, 32, 8, 8, 16, 4)),
    128: (Tile(64, 64, 16, 16, 16, 16), Tile(32, 64, 16, 8, 16, 4), Tile(32, 32, 8, 8, 8, 4)),
    256: (Tile(32, 64, 16, 8, 16, 8), Tile(32, 64, 16, 8, 8, 4), Tile(32, 32, 8, 8, 8, 4)),
    512: (Tile(32, 128, 32, 8, 4, 4), Tile(16, 64, 16, 4, 4, 4)),
}

# For GPUs whose threads have 128 registers of 32 bytes (Intel), by the head width, both directions: 4 x 4 scores and
# 4 x 4 outputs an invocation and four columns staged at a time. With more of any, Mesa's compiler spills
# (bench/notes/anv.md).
FEW_REGISTERS = {
    32: (Tile(32, 32, 8, 8, 4, 4),),
    64: (Tile(32, 64, 16, 8, 4, 4),),
    128: (Tile(32, 128, 32, 8, 4, 4), Tile(16, 128, 32, 4, 4, 4)),
    256: (Tile(32, 256, 64, 8, 4, 4), Tile(16, 256, 64, 4, 4, 4)),
    512: (Tile(16, 512, 128, 4, 4, 4),),
}

# A software driver has a few cores to fill, a GPU hundreds of places.
WANTED_GROUPS = {"CPU": 16}


def decode_bytes(rows: int, width: int) -> int:
    """Workgroup memory of attention_decode.wgsl: queries, scores in quarters and whole, sums, and a tile of outputs."""
    keys, columns = 64, decode_columns(width)
    return rows * (ceil_div(width, 16) * 64 + keys * 24) + 8 * 17 * 4 + max(128, columns) * VEC4_BYTES


def decode_columns(width: int) -> int:
    """Invocations of attention_decode.wgsl across D."""
    return max(16, 1 << (ceil_div(width, 4) - 1).bit_length())


def plan(width: int, workgroup_bytes: int, adapter_type: str = "", few_registers: bool = False) -> Plan | None:
    """Choose the tiles for heads of `width`, or None where none fits `workgroup_bytes`."""
    forwards, backwards = _row(FORWARD, width), _row(BACKWARD, width)
    if few_registers:
        few = _row(FEW_REGISTERS, width)
        forwards, backwards = few + forwards, few + backwards
    forward = next((t for t in forwards if t.forward_bytes(width) <= workgroup_bytes), None)
    backward = next((t for t in backwards if t.backward_bytes(width) <= workgroup_bytes), None)
    if forward is None or backward is None:
        return None
    return Plan(forward, backward, backward, WANTED_GROUPS.get(adapter_type, Plan.wanted_groups))


def _row(table: Mapping[int, tuple[Tile, ...]], width: int) -> tuple[Tile, ...]:
    return table[min((w for w in table if w >= width), default=max(table))]
