"""IQ1_S and IQ1_M: GGUF's blocks of 256 elements in cells of 8. A cell is an entry of a codebook of -1, 0 and 1, moved
up or down by 1/8. Values are those of ggml's reference.

Source: ggml's dequantize_row_iq1_s and dequantize_row_iq1_m (github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from wgrad.device.formats.codebook_tables import codebook, codebook_words, nearest_entries
from wgrad.device.formats.codebooks import BLOCK
from wgrad.device.formats.frozen_weight import Array
from wgrad.device.formats.gguf_blocks import GgufBlocks, pack, unpack

_TABLE, _MOVE = "iq1_s", 0.125


@dataclass(frozen=True)
class Iq1SArray(GgufBlocks):
    """A weight in IQ1_S.

    codes: uint8 [out * in / 8], the low 8 bits of each cell's entry. heads: uint32 [out * in / 64], 16 bits for each 32
    elements: the high 3 bits of four entries, 3 bits of a scale, 1 bit to move down. d: float16 [out * in / 256]. grid:
    uint32 [1024], the codebook, with two entries in a word. Element = d * (2 * scale + 1) * (entry +- 0.125).
    """

    format: ClassVar[str] = "iq1_s"
    gguf_type: ClassVar[str] = "IQ1_S"
    block: ClassVar[int] = BLOCK
    block_bytes: ClassVar[int] = 2 + 32 + 16  # d, codes, heads

    codes: Array
    heads: Array
    d: Array
    grid: Array
    shape: tuple[int, int]

    def layout(self) -> Iterator[tuple[str, int, str]]:
        yield "codes", self.count // 8, "u8"
        yield "heads", self.count // 64, "u32"
        yield "d", self.count // BLOCK, "f16"
        yield "grid", codebook_words(_TABLE).size, "u32"

    def constants(self) -> dict[str, bool | int | float]:
        return {"MEDIUM": False}

    def finite_parts(self) -> Iterator[np.ndarray]:
        yield self._fields(slice(None), np.dtype(np.float32))[0]

    def rows(self, first: int, last: int, compute: np.dtype) -> np.ndarray:
        blocks = self.blocks_of(first, last)
        scales, high, down = self._fields(blocks, compute)
        numbers = self.codes.reshape(-1, 32)[blocks] | high.astype(np.uint16) << 8
        moved = (
            codebook(_TABLE)[numbers].astype(compute) - (1 + _MOVE * np.where(down, 1, -1)).astype(compute)[..., None]
        )
        values = moved.reshape(*scales.shape, -1) * scales[..., None]
        result: np.ndarray = values.reshape(-1, self.shape[1])
        return result

    def _fields(self, blocks: slice, compute: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the factors of groups [blocks, groups], and for each cell [blocks, 32] the high bits of its entry and
        whether it is moved down."""
        heads = np.ascontiguousarray(self.heads.reshape(-1, 4)[blocks]).view(np.uint16)
        scales = self.d[blocks, None].astype(compute) * (2 * (heads >> 12 & 7).astype(compute) + 1)
        high = (heads[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 32)
        return scales, high, np.repeat(heads >> 15, 4, axis=1)

    @classmethod
    def quantize(cls, w: np.ndarray, block_size: int = 256, double: bool = False) -> Self:
        """Quantize each group up to its largest value, and each cell to the nearest entry.

        ggml searches for scales of less error.
        """
        blocks = w.astype(np.float32).reshape(-1, BLOCK)
        groups = blocks.reshape(len(blocks), cls._groups(), -1)
        steps = np.abs(groups).max(axis=2) / np.float32(1 + _MOVE)
        d = (steps.max(axis=1) / np.float32(15)).astype(np.float16)
        wide = np.maximum(d.astype(np.float32), np.float32(1e-30))[:, None]  # of a block of zeros
        fields = np.rint((steps / wide - 1) / 2).clip(0, 7)
        size = (d[:, None].astype(np.float32) * (2 * fields + 1))[..., None]
        down = groups.mean(axis=2) < 0
        moves = np.where(down, -_MOVE, _MOVE).astype(np.float32)[..., None]
        cells = (groups / np.where(size == 0, 1, size) - moves + 1).reshape(-1, 8)
        numbers = nearest_entries(cells, codebook(_TABLE)).reshape(len(blocks), 32)
        return cls._of(numbers.astype(np.uint16), fields.astype(np.uint16), down, d, (w.shape[0], w.shape[1]))

    @classmethod
    def _groups(cls) -> int:
        """Return the number of groups of a block, which have a scale each."""
        return 8

    @classmethod
    def _of(
        cls, numbers: np.ndarray, scales: np.ndarray, down: np.ndarray, d: np.ndarray, shape: tuple[int, int]
    ) -> Self:
        """Return a weight of these parts.

        numbers (entries): uint16 [blocks, 32]; scales: uint16, down: bool [blocks, groups]; d: float16 [blocks].
        """
        high = ((numbers >> 8).reshape(-1, 8, 4) << np.arange(0, 12, 3, dtype=np.uint16)).sum(axis=2, dtype=np.uint16)
        heads = np.ascontiguousarray(high | scales << 12 | down.astype(np.uint16) << 15)
        codes = (numbers & 255).astype(np.uint8).reshape(-1)
        return cls(codes, heads.view("<u4").reshape(-1), d, codebook_words(_TABLE), shape)

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Self:
        d, codes, heads = cls.split(rows, 2, 32)
        return cls(
            codes.reshape(-1), heads.view("<u4").reshape(-1), d.view("<f2").reshape(-1), codebook_words(_TABLE), shape
        )


@dataclass(frozen=True)
class Iq1MArray(Iq1SArray):
    """A weight in IQ1_M.

    As Iq1SArray, with a scale for each 16 elements, and each cell moved up or down by itself. heads: 4 bits for each
    cell: the high 3 bits of its entry, 1 bit to move down. d: uint32 [out * in / 128], two for each 256 elements, in
    halves of 16 bits: four scales of 3 bits, then 4 bits of the float16 d, the lowest first.
    """

    format: ClassVar[str] = "iq1_m"
    gguf_type: ClassVar[str] = "IQ1_M"
    block_bytes: ClassVar[int] = 32 + 16 + 8  # codes, heads, scales with d

    def layout(self) -> Iterator[tuple[str, int, str]]:
        for part, size, kind in super().layout():
            yield (part, self.count // 128, "u32") if part == "d" else (part, size, kind)

    def constants(self) -> dict[str, bool | int | float]:
        return {"MEDIUM": True}

    def _fields(self, blocks: slice, compute: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        heads = unpack(np.ascontiguousarray(self.heads.reshape(-1, 4)[blocks]).view(np.uint8), 4)
        words = np.ascontiguousarray(self.d.reshape(-1, 2)[blocks]).view(np.uint16)
        d = (words >> 12 << np.arange(0, 16, 4, dtype=np.uint16)).sum(axis=1, dtype=np.uint16).view(np.float16)
        scales = (words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 16)
        return d[:, None].astype(compute) * (2 * scales.astype(compute) + 1), heads & 7, heads >> 3

    @classmethod
    def _groups(cls) -> int:
        return 16

    @classmethod
    def _of(
        cls, numbers: np.ndarray, scales: np.ndarray, down: np.ndarray, d: np.ndarray, shape: tuple[int, int]
    ) -> Self:
        heads = pack(numbers >> 8 | np.repeat(down, 2, axis=1).astype(np.uint16) << 3, 4)
        places = np.arange(0, 12, 3, dtype=np.uint16)
        words = (scales.reshape(-1, 4, 4) << places).sum(axis=2, dtype=np.uint16)
        words |= (d.view(np.uint16)[:, None] >> np.arange(0, 16, 4, dtype=np.uint16) & 15) << 12
        codes = (numbers & 255).astype(np.uint8).reshape(-1)
        heads, words = heads.view("<u4"), np.ascontiguousarray(words).view("<u4").reshape(-1)
        return cls(codes, heads, words, codebook_words(_TABLE), shape)

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Self:
        codes, heads, words = (part.reshape(-1) for part in cls.split(rows, 32, 16))
        return cls(codes, heads.view("<u4"), words.view("<u4"), codebook_words(_TABLE), shape)
