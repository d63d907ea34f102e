"""Tiles of gemv.wgsl, the GEMM of few rows with a transposed right operand."""

from __future__ import annotations

from dataclasses import dataclass

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.wgsl.formats.formats import WeightForm, widest_unit
from wgrad.wgsl.runtime.compile import Constant

MOST_ROWS = 16  # the sums of all rows are kept in registers
FEW_REGISTERS_ROWS = 8  # on GPUs of few registers (Intel): Mesa's compiler spills the sums of more (bench/notes/anv.md)
_COLUMNS = 4  # of a team, as the shader has it
_LEAST_SUBGROUP = 4  # of WebGPU, as the shader has it
_SUBGROUP = 32  # lanes of a team to begin with
_THREADS, _MOST_LANES = 256, 128
_WIDE_ROWS = 8  # more rows take half as many invocations: the sums of their teams must fit into workgroup memory
# WebGPU does not tell how many invocations a GPU runs at once: teams grow until there are about this many.
_WANTED_INVOCATIONS = 1 << 17

# A wide unit unpacks its scale once and reads codes 16 bytes at a time. All rows multiply a unit in unrolled code; with
# more products than these it is slower on an H200 (bench/notes/rejected-few-rows.md).
_MOST_PRODUCTS = 128  # rows times elements of a unit: 32 for 4 rows, 16 for 8, 8 for 16
_FEW_REGISTERS_PRODUCTS = 64  # likewise
_FACTORED_ROWS = 4  # up to so many rows, scaling the sums of units is less work than scaling their elements


@dataclass(frozen=True)
class VectorTile:
    """A workgroup's invocations, and how many of them (a team of `lanes`) share the four columns of a result.

    m: rows of A at most; in a grouped GEMM those of a workgroup.
    """

    threads: int
    lanes: int
    k: int = 1  # it is never split over K
    m: int = MOST_ROWS

    @property
    def n(self) -> int:
        """Columns of the result per workgroup."""
        return _COLUMNS * self.threads // self.lanes

    def constants(self, rows: int, subgroups: bool) -> dict[str, Constant]:
        """rows: of A. subgroups: the device has subgroup operations."""
        shares: dict[str, Constant] = {"THREADS": self.threads, "LANES": self.lanes, "ROWS": rows}
        return {**shares, "TEAM": self.lanes > 1, "SUBGROUPS": subgroups and self.lanes > 1}


SOFTWARE = VectorTile(8, 1)  # a software driver's vector width; an invocation has four results alone: no barrier


def served(m: int, trans_a: bool, trans_b: bool, batch: int, few_registers: bool = False) -> bool:
    """Return whether gemv.wgsl serves a GEMM: x Wᵀ of few rows. few_registers: as in Runtime."""
    most = FEW_REGISTERS_ROWS if few_registers else MOST_ROWS
    return m <= most and batch == 1 and trans_b and not trans_a


def unit_of(weight: FrozenWeight | WeightForm, m: int, few_registers: bool = False) -> int:
    """Elements of the weight that are read at once."""
    return widest_unit(weight, (_FEW_REGISTERS_PRODUCTS if few_registers else _MOST_PRODUCTS) // m)


def factored(rounded: bool, m: int) -> bool:
    """Return whether the sum of a unit is scaled, not its elements. rounded: each value is rounded to 16 bits."""
    return m <= _FACTORED_ROWS and not rounded


def choose_tile(m: int, n: int, k: int, unit: int, software: bool) -> VectorTile:
    """unit: elements of the weight that are read at once."""
    if software:
        return SOFTWARE
    units, teams = -(-k // unit), -(-n // _COLUMNS)
    lanes = _SUBGROUP
    while lanes < _MOST_LANES and lanes * teams < _WANTED_INVOCATIONS and 2 * lanes <= units:
        lanes *= 2
    while lanes > _LEAST_SUBGROUP and lanes >= 2 * units:
        lanes //= 2
    return VectorTile(_THREADS if m <= _WIDE_ROWS else _THREADS // 2, lanes)
