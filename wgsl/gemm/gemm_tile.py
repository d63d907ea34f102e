"""Tiles of gemm.wgsl and gemm_direct.wgsl, and the choice among them."""

from __future__ import annotations

from dataclasses import dataclass

from wgrad.wgsl.runtime.compile import Constant


@dataclass(frozen=True)
class Tile:
    """A workgroup's m x n tile of the result, k deep; an invocation owns tm4 x tn4 blocks of 4 x 4."""

    m: int
    n: int
    k: int
    tm4: int
    tn4: int

    @property
    def threads(self) -> int:
        return (self.m // 4 // self.tm4) * (self.n // 4 // self.tn4)

    @property
    def workgroup_bytes(self) -> int:
        return (self.m + self.n) * self.k * 4 + 64

    def has_edges(self, mnk: tuple[int, int, int], unit: int) -> bool:
        """Return whether a tile reaches beyond M, N or K, or loads reach beyond a tile. unit: as in `constants`."""
        loads = (self.m * self.k // 4, self.n * self.k // unit)
        whole = all(size % part == 0 for size, part in zip(mnk, (self.m, self.n, self.k)))
        return not whole or any(count % self.threads for count in loads)

    def constants(self, unit: int) -> dict[str, Constant]:
        """unit: elements of B that are read at once."""
        return {
            "TILE_M": self.m,
            "TILE_N": self.n,
            "TILE_K": self.k,
            "TM4": self.tm4,
            "TN4": self.tn4,
            "ACC_ROWS": 4 * self.tm4,
            "LOADS_A": -(-self.m * self.k // 4 // self.threads),
            "LOADS_B": -(-self.n * self.k // unit // self.threads),
        }


# Measured on an H100 (bench/bench_gemm.py --sweep): 128 x 64 is best or within a few percent of it for every shape of
# the 135M, 1B and 8B models; 128 x 128 leaves too few workgroups to hide latency
# (bench/notes/rejected-float32-gemm.md).
MAIN = Tile(128, 64, 16, 2, 2)
# For GPUs of few registers (Intel): Mesa's compiler spills 97 to 233 registers with 8 x 8 results per invocation, and
# none with 8 x 4 (bench/notes/anv.md).
FEW_REGISTERS = Tile(64, 64, 8, 2, 1)
SMALL = Tile(32, 32, 16, 1, 1)
TALL_SKINNY = Tile(64, 16, 16, 1, 1)  # LoRA: N = rank
FLAT_SKINNY = Tile(16, 64, 16, 1, 1)  # LoRA: M = rank; decoding: M = 1


def software_tile(m: int, n: int) -> Tile:
    """The tile on software drivers: no workgroup memory, 16 x 16 results per invocation for fewer loads."""
    return Tile(16 if m <= 16 else 128, 16 if n <= 16 else 128, 4, 4, 4)


# WebGPU does not tell how many workgroups a GPU runs at once. A GEMM of fewer tiles than _FEW_TILES is split over K
# until there are about _WANTED_GROUPS, which fills the largest cards and costs small ones only the second pass.
_FEW_TILES, _WANTED_GROUPS, _WANTED_SKINNY_GROUPS = 300, 800, 288
_MIN_K_PER_SPLIT, _MIN_K_PER_SKINNY_SPLIT = 144, 64
_MAX_SPLITS, _MAX_SKINNY_SPLITS = 32, 16


def choose_tile(m: int, n: int, k: int, batch: int = 1, few_registers: bool = False) -> tuple[Tile, int]:
    """Tile and number of splits of K."""
    if min(m, n) <= 16:
        tile = TALL_SKINNY if n <= 16 else FLAT_SKINNY
        if batch > 1:
            return tile, 1
        splits = min(round(_WANTED_SKINNY_GROUPS / _count(m, n, tile)), k // _MIN_K_PER_SKINNY_SPLIT)
        return tile, max(1, min(splits, _MAX_SKINNY_SPLITS))
    tile = SMALL if min(m, n) <= 32 else FEW_REGISTERS if few_registers else MAIN
    tiles = _count(m, n, tile) * batch
    if batch > 1 or tiles >= 2 * _FEW_TILES:
        return tile, 1
    if tiles >= _FEW_TILES:
        return tile, 2 if k >= 2048 else 1
    return tile, max(1, min(round(_WANTED_GROUPS / tiles), k // _MIN_K_PER_SPLIT, _MAX_SPLITS))


def _count(m: int, n: int, tile: Tile) -> int:
    return -(-m // tile.m) * -(-n // tile.n)
