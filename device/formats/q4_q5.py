"""Q4_0, Q4_1, Q5_0, Q5_1: GGUF's blocks of 32 codes of 4 or 5 bits with a float16 scale, and in Q4_1 and Q5_1 a float16
minimum. Values are those of ggml's reference.

Source: ggml's quantize_row_q4_0_ref, dequantize_row_q4_0 and those of the others (github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from wgrad.device.formats.frozen_weight import Array
from wgrad.device.formats.gguf_blocks import GgufBlocks, nibbles_in_order, pack_nibbles, unpack


@dataclass(frozen=True)
class Q40Array(GgufBlocks):
    """A weight in Q4_0.

    codes: uint8 [out * in / 2], element 2j in the low nibble of byte j. scales: float16 [out * in / 32]. Element i is
    (code - 8) * scales[i // 32].

    With a minimum, scales are float16 [out * in / 16], each block's scale and minimum, and element i is code * scale +
    minimum.
    """

    format: ClassVar[str] = "q4_0"
    gguf_type: ClassVar[str] = "Q4_0"
    block: ClassVar[int] = 32
    block_bytes: ClassVar[int] = 2 + 16  # scale, codes
    bits: ClassVar[int] = 4  # bits of a code
    minimum: ClassVar[bool] = False

    codes: Array
    scales: Array
    shape: tuple[int, int]

    def layout(self) -> Iterator[tuple[str, int, str]]:
        yield "codes", self.count // 2, "u8"
        yield "scales", self.count // self.block * (2 if self.minimum else 1), "f16"

    def constants(self) -> dict[str, bool | int | float]:
        return {"FIFTH": self.bits == 5, "MINIMUM": self.minimum}

    def rows(self, first: int, last: int, compute: np.dtype) -> np.ndarray:
        blocks = self.blocks_of(first, last)
        codes = self._values_of_codes(blocks).astype(compute)
        scales = self.scales.reshape(-1, 2 if self.minimum else 1)[blocks].astype(compute)
        if self.minimum:
            values = codes * scales[:, :1] + scales[:, 1:]
        else:
            values = (codes - compute.type(1 << self.bits - 1)) * scales
        result: np.ndarray = values.reshape(-1, self.shape[1])
        return result

    def _values_of_codes(self, blocks: slice) -> np.ndarray:
        """Return the codes of these blocks: uint8 [blocks, 32]."""
        return unpack(self.codes.reshape(-1, self.block // 2)[blocks], 4)

    @classmethod
    def quantize(cls, w: np.ndarray, block_size: int = 32, double: bool = False) -> Self:
        """Quantize as ggml: without a minimum a block's largest value has code 0, with one its smallest value has."""
        blocks = w.astype(np.float32).reshape(-1, cls.block)
        if cls.minimum:
            least = blocks.min(axis=1, keepdims=True)
            scales = (blocks.max(axis=1, keepdims=True) - least) / np.float32((1 << cls.bits) - 1)
            blocks, zero, parts = blocks - least, np.float32(0.5), [scales, least]
        else:
            largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
            scales = largest / np.float32(-(1 << cls.bits - 1))
            zero, parts = np.float32((1 << cls.bits - 1) + 0.5), [scales]
        scaled = blocks * np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
        codes = np.trunc(scaled + zero).clip(0, (1 << cls.bits) - 1).astype(np.uint8)
        halves = np.concatenate(parts, axis=1).astype(np.float16).reshape(-1)
        return cls(pack_nibbles(codes & 15), halves, (w.shape[0], w.shape[1]), **cls._fifth(codes))

    @classmethod
    def _fifth(cls, codes: np.ndarray) -> dict[str, Any]:
        """Return the array of the codes' fifth bits by its field; {} for formats of 4 bits."""
        return {}

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Self:
        scales, *fifth, codes = cls.split(rows, 4 if cls.minimum else 2, *([4] if cls.bits == 5 else []))
        more = [bits.reshape(-1) for bits in fifth]
        return cls(nibbles_in_order(codes, 16), scales.view("<f2").reshape(-1), shape, *more)


@dataclass(frozen=True)
class Q41Array(Q40Array):
    """A weight in Q4_1. codes, scales: as in Q40Array, with a minimum."""

    format: ClassVar[str] = "q4_1"
    gguf_type: ClassVar[str] = "Q4_1"
    block_bytes: ClassVar[int] = 2 + 2 + 16  # scale, minimum, codes
    minimum: ClassVar[bool] = True


@dataclass(frozen=True)
class Q50Array(Q40Array):
    """A weight in Q5_0.

    codes, scales: as in Q40Array. high: uint8 [out * in / 8], the fifth bit of eight codes, the first lowest. Element i
    is (code - 16) * scales[i // 32].
    """

    format: ClassVar[str] = "q5_0"
    gguf_type: ClassVar[str] = "Q5_0"
    block_bytes: ClassVar[int] = 2 + 4 + 16  # scale, fifth bits, codes
    bits: ClassVar[int] = 5

    high: Array

    def layout(self) -> Iterator[tuple[str, int, str]]:
        yield from super().layout()
        yield "high", self.count // 8, "u8"

    def _values_of_codes(self, blocks: slice) -> np.ndarray:
        high = unpack(self.high.reshape(-1, self.block // 8)[blocks], 1)
        values: np.ndarray = super()._values_of_codes(blocks) | high << 4
        return values

    @classmethod
    def _fifth(cls, codes: np.ndarray) -> dict[str, Any]:
        return {"high": np.packbits(codes >> 4, bitorder="little")}


@dataclass(frozen=True)
class Q51Array(Q50Array):
    """A weight in Q5_1. codes, scales, high: as in Q50Array, with a minimum."""

    format: ClassVar[str] = "q5_1"
    gguf_type: ClassVar[str] = "Q5_1"
    block_bytes: ClassVar[int] = 2 + 2 + 4 + 16  # scale, minimum, fifth bits, codes
    minimum: ClassVar[bool] = True
