"""Q8_0: GGUF's blocks of 32 signed bytes with one float16 scale. Values are those of ggml's reference.

Source: ggml's quantize_row_q8_0_ref and dequantize_row_q8_0 (github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wgrad.device.formats.frozen_weight import Array
from wgrad.device.formats.gguf_blocks import GgufBlocks


@dataclass(frozen=True)
class Q8Array(GgufBlocks):
    """A weight in Q8_0.

    codes: uint8 [out * in], the bits of int8. scales: float16 [out * in / 32]. Element i is codes[i] * scales[i // 32].
    """

    format: ClassVar[str] = "q8_0"
    gguf_type: ClassVar[str] = "Q8_0"
    block: ClassVar[int] = 32
    block_bytes: ClassVar[int] = 2 + 32  # scale, codes

    codes: Array
    scales: Array
    shape: tuple[int, int]

    def layout(self) -> Iterator[tuple[str, int, str]]:
        yield "codes", self.count, "u8"
        yield "scales", self.count // self.block, "f16"

    def rows(self, first: int, last: int, compute: np.dtype) -> np.ndarray:
        blocks = self.blocks_of(first, last)
        codes = self.codes.reshape(-1, self.block)[blocks].view(np.int8).astype(compute)
        values: np.ndarray = (codes * self.scales[blocks, None].astype(compute)).reshape(-1, self.shape[1])
        return values

    @classmethod
    def quantize(cls, w: np.ndarray, block_size: int = 32, double: bool = False) -> Q8Array:
        """Quantize as ggml does in float32: round x * (1 / scale), before the scale is rounded, halves away from 0."""
        blocks = w.astype(np.float32).reshape(-1, cls.block)
        scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
        scaled = blocks * np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
        whole = np.trunc(scaled)
        codes = (whole + np.trunc(2 * (scaled - whole))).astype(np.int8)
        return cls(codes.view(np.uint8).reshape(-1), scales.reshape(-1).astype(np.float16), (w.shape[0], w.shape[1]))

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Q8Array:
        scales, codes = cls.split(rows, 2)
        return cls(codes.reshape(-1), scales.view("<f2").reshape(-1), shape)
