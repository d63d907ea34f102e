"""MXFP4: blocks of 32 codes of 4 bits (E2M1) with one power of two (E8M0). Values are those of ggml's reference.

Sources: OCP Microscaling Formats 1.0, section 5; ggml's dequantize_row_mxfp4 (github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wgrad.device.formats.frozen_weight import Array
from wgrad.device.formats.gguf_blocks import GgufBlocks, nibbles_in_order, pack_nibbles, unpack

_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32)  # codes 0 to 7; 8 to 15 are their negatives
LEVELS = np.concatenate([_DOUBLED, 0 - _DOUBLED])


@dataclass(frozen=True)
class Mxfp4Array(GgufBlocks):
    """A weight in MXFP4.

    codes: uint8 [out * in / 2], element 2j in the low nibble of byte j. exponents: uint8 [out * in / 32]. Element i is
    the value of its code times 2^(exponents[i // 32] - 127).
    """

    format: ClassVar[str] = "mxfp4"
    gguf_type: ClassVar[str] = "MXFP4"
    block: ClassVar[int] = 32
    block_bytes: ClassVar[int] = 1 + 16  # exponent, codes

    codes: Array
    exponents: Array
    shape: tuple[int, int]

    def layout(self) -> Iterator[tuple[str, int, str]]:
        yield "codes", self.count // 2, "u8"
        yield "exponents", self.count // self.block, "u8"

    def finite_parts(self) -> Iterator[np.ndarray]:
        with np.errstate(over="ignore"):
            yield _half_powers(self.exponents, np.dtype(np.float32)) * np.float32(12)

    def rows(self, first: int, last: int, compute: np.dtype) -> np.ndarray:
        blocks = self.blocks_of(first, last)
        codes = unpack(self.codes.reshape(-1, self.block // 2)[blocks], 4)
        scales = _half_powers(self.exponents[blocks, None], compute)
        values: np.ndarray = (LEVELS.astype(compute)[codes] * scales).reshape(-1, self.shape[1])
        return values

    @classmethod
    def quantize(cls, w: np.ndarray, block_size: int = 32, double: bool = False) -> Mxfp4Array:
        """Quantize as ggml does: to the nearest code, or the smaller one of two."""
        blocks = w.astype(np.float32).reshape(-1, cls.block)
        largest = np.abs(blocks).max(axis=1, keepdims=True)
        logs = np.floor(np.log2(largest, out=np.zeros_like(largest), where=largest > 0))
        exponents = np.where(largest > 0, logs - 2 + 127, 0).clip(0, 255).astype(np.uint8)
        sizes = np.abs(blocks) / _half_powers(exponents, np.dtype(np.float32))
        codes = np.searchsorted((_DOUBLED[:-1] + _DOUBLED[1:]) / 2, sizes, side="left")
        codes += 8 * ((blocks < 0) & (codes > 0))
        return cls(pack_nibbles(codes), exponents.reshape(-1), (w.shape[0], w.shape[1]))

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Mxfp4Array:
        exponents, codes = cls.split(rows, 1)
        return cls(nibbles_in_order(codes, 16), exponents.reshape(-1), shape)


def _half_powers(exponents: np.ndarray, compute: np.dtype) -> np.ndarray:
    """Return 2^(exponent - 128): half of each factor, since _DOUBLED is twice the values of the codes."""
    values: np.ndarray = np.ldexp(compute.type(1), exponents.astype(np.int32) - 128)
    return values
