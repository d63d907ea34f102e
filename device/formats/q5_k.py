"""Q5_K: Q4_K with one more bit for each code. Values are those of ggml's reference.

Source: ggml's dequantize_row_q5_K (github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wgrad.device.formats.frozen_weight import Array
from wgrad.device.formats.gguf_blocks import nibbles_in_order, pack_nibbles, unpack
from wgrad.device.formats.q4_k import GROUPS, Q4KArray, quantize_groups, scales_from_gguf


@dataclass(frozen=True)
class Q5KArray(Q4KArray):
    """A weight in Q5_K.

    codes, scales: as in Q4KArray. high: uint8 [out * in / 8], the fifth bit of eight codes, the first lowest.
    """

    format: ClassVar[str] = "q5_k"
    gguf_type: ClassVar[str] = "Q5_K"
    block_bytes: ClassVar[int] = 2 + 2 + 12 + 32 + 128  # d, dmin, scales and minima, fifth bits, codes

    high: Array

    def layout(self) -> Iterator[tuple[str, int, str]]:
        yield from super().layout()
        yield "high", self.count // 8, "u8"

    def values_of_codes(self, blocks: slice) -> np.ndarray:
        high = unpack(self.high.reshape(-1, self.block // 8)[blocks], 1)
        values: np.ndarray = super().values_of_codes(blocks) | high << 4
        return values

    @classmethod
    def quantize(cls, w: np.ndarray, block_size: int = 256, double: bool = False) -> Q5KArray:
        """Quantize as Q4KArray does."""
        codes, scales = quantize_groups(w, 31)
        whole = codes.astype(np.uint8).reshape(-1)
        high = np.packbits(whole >> 4, bitorder="little")
        return cls(pack_nibbles(whole & 15), scales, (w.shape[0], w.shape[1]), high)

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Q5KArray:
        head, groups, fifth, codes = cls.split(rows, 4, 12, 32)
        bits = fifth[:, None] >> np.arange(GROUPS, dtype=np.uint8)[:, None] & 1  # bit g of byte l: element l of group g
        high = np.packbits(bits.reshape(-1), bitorder="little")
        return cls(nibbles_in_order(codes, 32), scales_from_gguf(head, groups), shape, high)
