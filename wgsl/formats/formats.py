"""Frozen weights in blocks as operands of the shaders.

The file named by B_FORMAT decodes a unit of codes; nf4.inc.wgsl describes what such a file provides.
"""

from __future__ import annotations

from dataclasses import dataclass

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.formats.nf4 import NF4Array
from wgrad.device.memory import Array
from wgrad.wgsl.runtime.compile import Constant

_BLOCKS_OF_32 = ("q4_0", "q4_1", "q5_0", "q5_1")
_LEVELS = ("iq4_nl", "iq4_xs", "nvfp4")
_TWOS = ("q2_k", "q3_k", "tq1_0", "tq2_0")
_CODEBOOKS = ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")
FILES = {  # of formats without a file of their own name
    **dict.fromkeys(_BLOCKS_OF_32, "q4_q5.inc.wgsl"),
    **dict.fromkeys(_LEVELS, "levels.inc.wgsl"),
    **dict.fromkeys(_TWOS, "twos.inc.wgsl"),
    **dict.fromkeys(_CODEBOOKS, "codebook.inc.wgsl"),
    **dict.fromkeys(("iq1_s", "iq1_m"), "iq1.inc.wgsl"),
}
_NEVER = 0xFFFFFFFF  # an element that no weight has
_WIDEST_UNIT = 32  # elements of a weight that its shader file can read at once, except for those below
_NARROWER = {"q8_0": 16}
_GROUP = dict.fromkeys(("q6_k", "q2_k", "q3_k", "nvfp4", "iq2_xs", "iq2_s", "iq1_m"), 16)  # elements of one scale
_MOST_TABLE_WORDS = 256  # that fit into a kernel's workgroup memory next to its tiles
BLOCK = 16  # rows and columns of a block of a decoded weight (quantize_decode.wgsl)
KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}  # numbers of dtypes in the shaders


@dataclass(frozen=True)
class WeightForm:
    """Format and sizes of a frozen [out, in] weight.

    unit: elements decoded at once. rounded: values are rounded to a 16-bit type. stacked: several weights, one below
    the other. nested: scales are quantized too.
    """

    format: str
    unit: int
    shape: tuple[int, int]
    rounded: bool = False
    stacked: bool = False
    nested: bool = False

    @staticmethod
    def of(weight: FrozenWeight) -> WeightForm:
        """Format and sizes of a weight on a device."""
        rounded, nested = (bool(weight.constants().get(name)) for name in ("ROUND", "NESTED"))
        return WeightForm(weight.format, weight.unit, weight.shape, rounded, bool(weight.parts), nested)


def widest_unit(weight: FrozenWeight | WeightForm, most: int) -> int:
    """Elements of the weight that are read at once: at most `most`, and a divisor of the row."""
    unit = _NARROWER.get(weight.format, _WIDEST_UNIT)
    while unit > weight.unit and (unit > most or weight.shape[1] % unit):
        unit //= 2
    return unit


@dataclass(frozen=True)
class WeightOperand:
    """The right operand of a GEMM as a shader reads it.

    file, unit: B_FORMAT, and how many elements it reads at once.
    scales: for bindings 8 to 11.
    parameters: p.block_shift and p.nested_shift, 0 where the format has none.
    parts: rows of each weight of a stack.
    stack: p.part_1 to p.nested_2 (`_stack_parameters`).
    """

    file: str
    unit: int
    switches: dict[str, Constant]
    codes: Array
    scales: tuple[Array | None, ...] = ()
    parameters: tuple[int, int] = (0, 0)
    parts: tuple[int, ...] = ()
    stack: tuple[int, ...] = (0,) * 6

    @property
    def constants(self) -> dict[str, Constant]:
        return {"B_FORMAT": self.file, "UNIT": self.unit, "QUADS": self.unit // 4, **self.switches}


def weight_operand(
    w: FrozenWeight,
    unit: int,
    *,
    table: bool,
    barrier: bool = True,
    factored: bool = False,
    halves: bool = False,
    shuffled: bool = False,
) -> WeightOperand:
    """Bind a frozen weight.

    unit: elements that the kernel reads at once.
    table: workgroup memory has room for decoding tables next to the tiles.
    barrier: prepare_b ends with a barrier; where the kernel has one anyway, a second cost dx up to 7 % (NVIDIA).
    factored: the kernel scales the sums of units, not their elements.
    halves: elements are float16, not float32.
    shuffled: NF4's levels are read from other invocations of a subgroup, all of which decode at the same time.
    """
    codes, *scales = w.arrays().values()
    assert codes is not None
    switches: dict[str, Constant] = {**w.constants(), "PREPARE_BARRIER": barrier, "FACTORED": factored}
    switches |= {"HALVES": halves, "SHUFFLED": shuffled}
    switches["TABLE"] = table and int(switches.get("TABLE_WORDS", 0)) <= _MOST_TABLE_WORDS
    switches["GROUPS"] = groups = max(1, unit // _GROUP.get(w.format, unit))
    switches["GROUP_QUADS"] = unit // 4 // groups
    switches["TIMES_16"] = unit > w.unit and not factored  # how q6_k.inc.wgsl makes floats
    first, second = (*w.parameters(), 0, 0)[:2]
    more = (w.parts, _stack_parameters(w)) if isinstance(w, NF4Array) and w.parts else ()
    file = FILES.get(w.format, f"{w.format}.inc.wgsl")
    return WeightOperand(file, unit, switches, codes, tuple(scales), (first, second), *more)


def dense_operand(b: Array, unit: int) -> WeightOperand:
    """Bind an array. unit: elements that the kernel reads at once, 4 or 8 (on tensor cores)."""
    part = "common.inc.wgsl:matrix_dense" if unit == 8 else "gemm.inc.wgsl:dense"
    return WeightOperand(part, unit, {"B_KIND": KINDS[b.dtype_name]}, b)


def part_bounds(parts: tuple[int, ...], end: int) -> tuple[int, int]:
    """Return the starts of the second and third part; `end` (beyond all elements) for a part that does not exist."""
    second, third = (*parts, 0, 0)[:2]
    return (second if parts else end), (second + third if len(parts) > 2 else end)


def _stack_parameters(w: NF4Array) -> tuple[int, ...]:
    """Return three values for the second part and the third: the first element, and the offsets from the numbers of a
    block and of a nested block to their indices in absmax and nested absmax."""
    places = [*w.places()[1 : len(w.parts)], None, None][:2]
    elements = tuple(_NEVER if at is None else at.element for at in places)
    absmax = tuple(0 if at is None else at.absmax - at.block for at in places)
    nested = tuple(0 if at is None else at.nested - at.absmax // w.nested_block_size for at in places)
    return elements + absmax + nested
