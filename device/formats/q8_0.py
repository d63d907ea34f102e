"""Q8_0: GGUF's blocks of 32 signed bytes with one float16 scale; value for value as ggml's reference has it.

Source: ggml's quantize_row_q8_0_ref and dequantize_row_q8_0 (github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from wgrad.device.formats.frozen_weight import Array, FrozenWeight

BLOCK = 32  # elements of a row
BLOCK_BYTES = 2 + BLOCK  # in a GGUF file: the scale, then the codes


@dataclass(frozen=True)
class Q8Array(FrozenWeight):
    """A frozen [out, in] weight of Q8_0 on a device; `in` is a multiple of 32.

    codes: uint8 [out * in], the bits of int8. scales: float16 [out * in / 32]. Element i is codes[i] * scales[i // 32].
    A file has each scale in front of its codes; apart, both can be read in words of 32 bits.
    """

    format: ClassVar[str] = "q8_0"
    gguf_type: ClassVar[str] = "Q8_0"
    unit: ClassVar[int] = 8

    codes: Array
    scales: Array
    shape: tuple[int, int]
    value_dtype: str = field(default="float32", init=False)

    def arrays(self) -> dict[str, Array | None]:
        return {"codes": self.codes, "scales": self.scales}

    def rules(self) -> Iterator[tuple[bool, str]]:
        columns = int(self.shape[1])
        yield columns % BLOCK == 0, f"shape must have rows of whole blocks of {BLOCK}, got {columns} elements"

    def layout(self) -> Iterator[tuple[str, int, str]]:
        count = int(self.shape[0]) * int(self.shape[1])
        yield "codes", count, "u8"
        yield "scales", count // BLOCK, "f16"

    def constants(self) -> dict[str, bool | int | float]:
        return {}

    def parameters(self) -> tuple[int, ...]:
        return ()

    def rows(self, first: int, last: int, compute: np.dtype) -> np.ndarray:
        blocks = slice(first * self.shape[1] // BLOCK, last * self.shape[1] // BLOCK)
        codes = self.codes.reshape(-1, BLOCK)[blocks].view(np.int8).astype(compute)
        return (codes * self.scales[blocks, None].astype(compute)).reshape(-1, self.shape[1])

    @classmethod
    def quantize(cls, w: np.ndarray, block_size: int = BLOCK, double: bool = False) -> Q8Array:
        """As ggml in float32: codes of x * (1 / scale) before the scale is rounded, a half away from zero."""
        blocks = w.astype(np.float32).reshape(-1, BLOCK)
        scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
        scaled = blocks * np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
        whole = np.trunc(scaled)
        codes = (whole + np.trunc(2 * (scaled - whole))).astype(np.int8)
        return cls(codes.view(np.uint8).reshape(-1), scales.reshape(-1).astype(np.float16), (w.shape[0], w.shape[1]))

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Q8Array:
        scales, codes = np.split(rows.reshape(-1, BLOCK_BYTES), [2], axis=1)
        return cls(codes.reshape(-1), np.ascontiguousarray(scales).view("<f2").reshape(-1), shape)
