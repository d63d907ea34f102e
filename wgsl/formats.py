"""Frozen weights of blocks as the shaders read them: one entry a format. How a unit of its codes is decoded stands in
the shader file that B_FORMAT names; nf4.wgsl says what such a file must give."""

from __future__ import annotations

from dataclasses import dataclass

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.memory import Array
from wgrad.wgsl.runtime.compile import Constant

KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}  # as the shaders know them


@dataclass(frozen=True)
class WeightOperand:
    """file, unit: B_FORMAT, and how many elements it reads at once. scales: for bindings 8 to 11. parameters: the
    two integers that the format's file knows as p.block_shift and p.nested_shift, 0 where it has none."""

    file: str
    unit: int
    switches: dict[str, Constant]
    codes: Array
    scales: tuple[Array | None, ...] = ()
    parameters: tuple[int, int] = (0, 0)

    @property
    def constants(self) -> dict[str, Constant]:
        return {"B_FORMAT": self.file, "UNIT": self.unit, "QUADS": self.unit // 4, **self.switches}


def weight_operand(w: FrozenWeight, *, table: bool) -> WeightOperand:
    """table: workgroup memory has room for what decoding looks up, beside the tiles."""
    codes, *scales = w.arrays().values()
    assert codes is not None
    switches: dict[str, Constant] = {**w.constants(), "TABLE": table}
    first, second = (*w.parameters(), 0, 0)[:2]
    return WeightOperand(f"{w.format}.wgsl", w.unit, switches, codes, tuple(scales), (first, second))
