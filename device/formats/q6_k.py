"""Q6_K: GGUF's blocks of 256 codes of 6 bits. Each 16 have a scale of 8 bits. Values are those of ggml's reference.

Source: ggml's dequantize_row_q6_K (github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wgrad.device.formats.frozen_weight import Array
from wgrad.device.formats.gguf_blocks import GgufBlocks, pack_nibbles, unpack

GROUPS, GROUP = 16, 16  # groups of a block, and elements of a group, which has one scale


@dataclass(frozen=True)
class Q6KArray(GgufBlocks):
    """A weight in Q6_K.

    codes: uint8 [out * in / 2], the low 4 bits, element 2j in the low nibble of byte j. high: uint8 [out * in / 4], the
    high 2 bits of four elements, the first in the lowest bits. scales: uint8 [out * in / 16], the bits of int8. d:
    float16 [out * in / 256]. Element i is d[i // 256] * scales[i // 16] * (code - 32).
    """

    format: ClassVar[str] = "q6_k"
    gguf_type: ClassVar[str] = "Q6_K"
    block: ClassVar[int] = GROUPS * GROUP
    block_bytes: ClassVar[int] = 128 + 64 + 16 + 2  # low bits, high bits, scales, d

    codes: Array
    high: Array
    scales: Array
    d: Array
    shape: tuple[int, int]

    def layout(self) -> Iterator[tuple[str, int, str]]:
        yield "codes", self.count // 2, "u8"
        yield "high", self.count // 4, "u8"
        yield "scales", self.count // GROUP, "u8"
        yield "d", self.count // self.block, "f16"

    def rows(self, first: int, last: int, compute: np.dtype) -> np.ndarray:
        blocks = self.blocks_of(first, last)
        low = unpack(self.codes.reshape(-1, self.block // 2)[blocks], 4)
        high = unpack(self.high.reshape(-1, self.block // 4)[blocks], 2)
        codes = (low | high << 4).reshape(-1, GROUPS, GROUP).astype(compute) - compute.type(32)
        scales = self.scales.reshape(-1, GROUPS)[blocks].view(np.int8).astype(compute)
        scales = scales * self.d[blocks, None].astype(compute)
        values: np.ndarray = (scales[..., None] * codes).reshape(-1, self.shape[1])
        return values

    @classmethod
    def quantize(cls, w: np.ndarray, block_size: int = 256, double: bool = False) -> Q6KArray:
        """Quantize each group up to its largest magnitude; ggml searches for scales of less error."""
        groups = w.astype(np.float32).reshape(-1, GROUPS, GROUP)
        steps = np.abs(groups).max(axis=2) / np.float32(31)
        d = (steps.max(axis=1) / np.float32(127)).astype(np.float16)
        wide = np.maximum(d.astype(np.float32), np.float32(1e-30))[:, None]  # of a block of zeros
        scales = np.rint(steps / wide).clip(0, 127)
        scale = (scales * wide)[..., None]
        codes = (np.rint(groups / np.where(scale == 0, 1, scale)).clip(-32, 31) + 32).astype(np.uint8)
        return cls(*_packed(codes), scales.astype(np.uint8).reshape(-1), d, (w.shape[0], w.shape[1]))

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Q6KArray:
        low, high, scales, d = cls.split(rows, 128, 64, 16)
        halves = low.reshape(-1, 2, 2, 32)  # of each 128 elements: the low nibbles of 64 bytes, then the high nibbles
        low = np.stack([halves & 15, halves >> 4], axis=2).reshape(-1, 2, 4, 32)
        pairs = high.reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
        return cls(*_packed(low | pairs << 4), scales.reshape(-1), d.view("<f2").reshape(-1), shape)


def _packed(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pack codes of 6 bits, in the order of their elements, into `codes` and `high` of Q6KArray."""
    fours = (codes >> 4).reshape(-1, 4)
    return pack_nibbles(codes & 15), fours[:, 0] | fours[:, 1] << 2 | fours[:, 2] << 4 | fours[:, 3] << 6
