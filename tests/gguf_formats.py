"""Knowledge of GGUF types in tests: a row for each that wgrad decodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class FormatRow:
    """A GGUF type in tests.

    Args:
        tensors: Tensors of a model that has all types, as gguf_writer.py writes it; with a number, of this layer alone.
            Rows of o_proj have 64 elements, of down_proj 96, and of others 256.
        halves: Bytes of a block at which a float16 begins, and how large it is next to the first for values of both
            signs.
        error: Most error of `quantize`, its root mean square in standard deviations; 0: it equals the gguf package's.
        in_file: Bytes of a block in a file and on a device, if they differ.
    """

    tensors: tuple[str, ...]
    halves: Mapping[int, float] = field(default_factory=dict)
    error: float = 0.0
    in_file: tuple[int, int] = (1, 1)


ONE, WITH_LEAST = {0: 1.0}, {0: 1.0, 2: 7.5}
FORMAT_ROWS = {
    "Q4_0": FormatRow(("o_proj",), ONE),
    "Q4_1": FormatRow(("1.o_proj",), WITH_LEAST),
    "Q5_0": FormatRow(("1.gate_proj",), ONE),
    "Q5_1": FormatRow(("1.down_proj",), {0: 1, 2: 15.5}),
    "Q8_0": FormatRow(("down_proj",), ONE),
    "MXFP4": FormatRow(("gate_proj",)),
    "NVFP4": FormatRow(("2.o_proj",), error=0.12),
    "Q2_K": FormatRow(("1.q_proj",), {80: 1, 82: 1.5}, 0.37),
    "Q3_K": FormatRow(("1.k_proj",), {108: 1}, 0.18),
    "Q4_K": FormatRow(("q_proj",), WITH_LEAST, 0.09),
    "Q5_K": FormatRow(("k_proj",), {0: 1, 2: 15.5}, 0.045),
    "Q6_K": FormatRow(("v_proj", "embed_tokens"), {208: 1}, 0.02),
    "TQ1_0": FormatRow(("3.gate_proj",), {52: 1}, in_file=(54, 66)),  # five codes a byte
    "TQ2_0": FormatRow(("3.up_proj",), {64: 1}),
    "IQ1_S": FormatRow(("3.q_proj",), ONE, 0.9),
    "IQ1_M": FormatRow(("3.k_proj",), error=0.9),
    "IQ2_XXS": FormatRow(("2.q_proj",), ONE, 0.39),
    "IQ2_XS": FormatRow(("2.k_proj",), ONE, 0.34),
    "IQ2_S": FormatRow(("2.v_proj",), ONE, 0.29),
    "IQ3_XXS": FormatRow(("2.gate_proj",), ONE, 0.21),
    "IQ3_S": FormatRow(("2.up_proj",), ONE, 0.16),
    "IQ4_NL": FormatRow(("2.down_proj",), ONE, 0.09),
    "IQ4_XS": FormatRow(("1.v_proj",), ONE, 0.09),
}
