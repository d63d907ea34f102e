"""TQ2_0 and TQ1_0: GGUF's blocks of 256 codes for -1, 0 and 1 with one float16 scale. Values are those of ggml's
reference.

Source: ggml's dequantize_row_tq2_0 and dequantize_row_tq1_0 (github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from wgrad.device.formats.frozen_weight import Array
from wgrad.device.formats.gguf_blocks import GgufBlocks, in_order, pack, unpack


@dataclass(frozen=True)
class Tq20Array(GgufBlocks):
    """A weight in TQ2_0.

    codes: uint8 [out * in / 4], four of 2 bits, the first in the lowest bits. d: float16 [out * in / 256]. Element i is
    d[i // 256] * (code - 1).
    """

    format: ClassVar[str] = "tq2_0"
    gguf_type: ClassVar[str] = "TQ2_0"
    block: ClassVar[int] = 256
    block_bytes: ClassVar[int] = 64 + 2  # codes, d

    codes: Array
    d: Array
    shape: tuple[int, int]

    @property
    def variant(self) -> str:
        return "tq2_0"

    def layout(self) -> Iterator[tuple[str, int, str]]:
        yield "codes", self.count // 4, "u8"
        yield "d", self.count // self.block, "f16"

    def constants(self) -> dict[str, bool | int | float]:
        return {"SCALES": 2}

    def rows(self, first: int, last: int, compute: np.dtype) -> np.ndarray:
        blocks = self.blocks_of(first, last)
        codes = unpack(self.codes.reshape(-1, 64)[blocks], 2).astype(compute) - compute.type(1)
        values: np.ndarray = (self.d[blocks, None].astype(compute) * codes).reshape(-1, self.shape[1])
        return values

    @classmethod
    def quantize(cls, w: np.ndarray, block_size: int = 256, double: bool = False) -> Self:
        """Quantize as ggml does: to -1, 0 or 1 times a block's largest magnitude, halves away from 0."""
        blocks = w.astype(np.float32).reshape(-1, cls.block)
        d = np.abs(blocks).max(axis=1, keepdims=True)
        scaled = blocks * np.divide(1, d, out=np.zeros_like(d), where=d != 0)
        codes = np.trunc(2 * scaled).clip(-1, 1) + 1
        return cls(pack(codes, 2), d.reshape(-1).astype(np.float16), (w.shape[0], w.shape[1]))

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Self:
        codes, d = cls.split(rows, 64)
        return cls(in_order(codes, 32, 2), d.view("<f2").reshape(-1), shape)


@dataclass(frozen=True)
class Tq10Array(Tq20Array):
    """A weight in TQ1_0, whose files have five codes in a byte. On a device its codes are those of Tq20Array."""

    format: ClassVar[str] = "tq1_0"
    gguf_type: ClassVar[str] = "TQ1_0"
    block_bytes: ClassVar[int] = 48 + 4 + 2  # codes by five, by four, d

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Self:
        fives, more, fours, d = cls.split(rows, 32, 16, 4)
        codes = np.concatenate([_digits(fives, 5), _digits(more, 5), _digits(fours, 4)], axis=1)
        return cls(pack(codes, 2), d.view("<f2").reshape(-1), shape)


def _digits(data: np.ndarray, count: int) -> np.ndarray:
    """Return the first `count` base-3 digits of each byte / 256: uint8 [blocks, count * n]. data: uint8 [blocks, n]."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
    left = data[:, None] * powers  # uint8 wraps: only the fraction remains
    return (left.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(data), -1)
