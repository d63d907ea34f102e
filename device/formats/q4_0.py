"""Q4_0: GGUF's blocks of 32 codes of 4 bits with one float16 scale; value for value as ggml's reference has it.

Source: ggml's quantize_row_q4_0_ref and dequantize_row_q4_0 (github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wgrad.device.formats.frozen_weight import Array
from wgrad.device.formats.gguf_blocks import GgufBlocks, nibbles_in_order, pack_nibbles, unpack


@dataclass(frozen=True)
class Q4Array(GgufBlocks):
    """codes: uint8 [out * in / 2], element 2j in the low nibble of byte j. scales: float16 [out * in / 32]. Element i
    is (code - 8) * scales[i // 32]."""

    format: ClassVar[str] = "q4_0"
    gguf_type: ClassVar[str] = "Q4_0"
    block: ClassVar[int] = 32
    block_bytes: ClassVar[int] = 2 + 16  # scale, codes

    codes: Array
    scales: Array
    shape: tuple[int, int]

    def layout(self) -> Iterator[tuple[str, int, str]]:
        yield "codes", self.count // 2, "u8"
        yield "scales", self.count // self.block, "f16"

    def rows(self, first: int, last: int, compute: np.dtype) -> np.ndarray:
        blocks = self.blocks_of(first, last)
        codes = unpack(self.codes.reshape(-1, self.block // 2)[blocks], 4).astype(compute) - compute.type(8)
        return (codes * self.scales[blocks, None].astype(compute)).reshape(-1, self.shape[1])

    @classmethod
    def quantize(cls, w: np.ndarray, block_size: int = 32, double: bool = False) -> Q4Array:
        """As ggml: the largest value of a block is code 0."""
        blocks = w.astype(np.float32).reshape(-1, cls.block)
        largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
        scales = largest / np.float32(-8)
        scaled = blocks * np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
        codes = np.trunc(scaled + np.float32(8.5)).clip(0, 15)
        return cls(pack_nibbles(codes), scales.reshape(-1).astype(np.float16), (w.shape[0], w.shape[1]))

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Q4Array:
        scales, codes = cls.split(rows, 2)
        return cls(nibbles_in_order(codes, 16), scales.view("<f2").reshape(-1), shape)
