"""IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS and IQ3_S: GGUF's blocks of 256 elements in cells of 8 or 4. A cell is an entry of
the format's codebook with signs and a scale. Values are those of ggml's reference.

Source: ggml's dequantize_row_iq2_xxs and those of the others (github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from wgrad.device.formats.codebook_tables import codebook, codebook_words, nearest_entries
from wgrad.device.formats.frozen_weight import Array
from wgrad.device.formats.gguf_blocks import GgufBlocks, pack, unpack

BLOCK = 256


@dataclass(frozen=True)
class Iq2XxsArray(GgufBlocks):
    """A weight in IQ2_XXS.

    codes: uint8 [out * in / 8], the entry of each cell of 8. signs: uint32 [out * in / 32], in the order of
    `reordered`. The last sign of each 8 makes the number of negative elements even; in place of these, the highest 4
    bits are a scale. d: float16 [out * in / 256]. grid: uint32, the codebook. Element = d * (2 * scale + 1) / 8 *
    entry.
    """

    format: ClassVar[str] = "iq2_xxs"
    gguf_type: ClassVar[str] = "IQ2_XXS"
    block: ClassVar[int] = BLOCK
    block_bytes: ClassVar[int] = 2 + 64  # d; four entries, signs and a scale for each 32
    cell: ClassVar[int] = 8
    factor: ClassVar[float] = 0.125
    moves: ClassVar[tuple[tuple[int, int], ...]] = ((14, 0xCCCC), (7, 0xAA00AA))

    codes: Array
    signs: Array
    d: Array
    grid: Array
    shape: tuple[int, int]

    def layout(self) -> Iterator[tuple[str, int, str]]:
        yield "codes", self.count // self.cell, "u8"
        yield "signs", self.count // 32, "u32"
        yield "d", self.count // BLOCK, "f16"
        yield "grid", codebook_words(self.format).size, "u32"

    def constants(self) -> dict[str, bool | int | float]:
        words = codebook_words(self.format).size
        return {"CELL": self.cell, "FACTOR": self.factor, "FORM": 0, "NIBBLES": False, "TABLE_WORDS": words}

    def finite_parts(self) -> Iterator[np.ndarray]:
        yield self._scales_of(slice(None), np.dtype(np.float32))

    def rows(self, first: int, last: int, compute: np.dtype) -> np.ndarray:
        blocks = self.blocks_of(first, last)
        sizes = codebook(self.format)[self._entries_of(blocks)].reshape(-1, BLOCK).astype(compute)
        scales = self._scales_of(blocks, compute)
        values = sizes.reshape(*scales.shape, -1) * scales[..., None]
        result: np.ndarray = np.where(self._signs_of(blocks).reshape(values.shape), -values, values)
        return result.reshape(-1, self.shape[1])

    def _entries_of(self, blocks: slice) -> np.ndarray:
        """Return the entries of these blocks: [blocks, 256 / cell]."""
        entries: np.ndarray = self.codes.reshape(-1, BLOCK // self.cell)[blocks]
        return entries

    def _signs_of(self, blocks: slice) -> np.ndarray:
        """Return 1 for each negative element: [blocks, 256]."""
        words = self.signs.reshape(-1, 8)[blocks]
        return unpack(self.reordered(_even(words) if self.even() else words).view(np.uint8), 1)

    def _scales_of(self, blocks: slice, compute: np.dtype) -> np.ndarray:
        """Return the factor of each group: [blocks, groups]."""
        fields = self.signs.reshape(-1, 8)[blocks] >> 28
        return self._scaled(self.d[blocks], fields, compute)

    def _scaled(self, d: np.ndarray, fields: np.ndarray, compute: np.dtype) -> np.ndarray:
        values: np.ndarray = d[:, None].astype(compute) * (2 * fields.astype(compute) + 1) * compute.type(self.factor)
        return values

    @classmethod
    def quantize(cls, w: np.ndarray, block_size: int = 256, double: bool = False) -> Self:
        """Quantize each group up to its largest value, and each cell to the nearest entry.

        ggml searches for scales of less error.
        """
        blocks = w.astype(np.float32).reshape(-1, BLOCK)
        table = codebook(cls.format).astype(np.float32)
        groups = np.abs(blocks).reshape(len(blocks), cls.groups(), -1)
        steps = groups.max(axis=2) / (table.max() * np.float32(cls.factor))
        d = (steps.max(axis=1) / np.float32(31)).astype(np.float16)
        wide = np.maximum(d.astype(np.float32), np.float32(1e-30))[:, None]  # of a block of zeros
        fields = np.rint((steps / wide - 1) / 2).clip(0, 15)
        size = (d[:, None].astype(np.float32) * (2 * fields + 1) * np.float32(cls.factor))[..., None]
        cells = (groups / np.where(size == 0, 1, size)).reshape(-1, cls.cell)
        entries = nearest_entries(cells, codebook(cls.format)).reshape(len(blocks), -1)
        signs = (blocks < 0).reshape(-1, 8)
        if cls.even():
            odd = np.flatnonzero(signs.sum(axis=1) % 2)
            least = np.abs(blocks).reshape(-1, 8)[odd].argmin(axis=1)
            signs[odd, least] ^= True
        packed = pack(signs, 1).reshape(len(blocks), 32)
        return cls.of(entries.astype(np.uint16), packed, fields.astype(np.uint8), d, (w.shape[0], w.shape[1]))

    @classmethod
    def groups(cls) -> int:
        """Return the number of groups of a block, which have a scale each."""
        return 8

    @classmethod
    def even(cls) -> bool:
        """Return whether the eighth sign is not stored, but makes the number of negative elements even."""
        return True

    @classmethod
    def reordered(cls, words: np.ndarray) -> np.ndarray:
        """Move the signs of 32 elements from element order to that of devices, or back.

        Devices have the sign of element 8c + 4h + j at bit 8j + 4h + c, of IQ3_S the sign of element 16g + 4q + j at
        bit 16g + 4j + q: four consecutive elements have it at the same place of four equal fields. words: uint32.
        """
        for shift, mask in cls.moves:  # each exchanges two bits of the index
            moved = (words ^ words >> shift) & mask
            words = words ^ moved ^ moved << shift
        return words

    @classmethod
    def sign_words(cls, signs: np.ndarray, above: np.ndarray) -> np.ndarray:
        """Return `signs` without the last of each 8. signs: uint8 of 8 elements each. above: the highest 4 bits."""
        words = cls.reordered(np.ascontiguousarray(signs).reshape(-1).view("<u4")) & 0x0FFFFFFF
        with_others: np.ndarray = words | above.astype(np.uint32) << 28
        return with_others

    @classmethod
    def from_sevens(cls, words: np.ndarray) -> np.ndarray:
        """Return `signs`, given a file's words: 7 signs of each cell, then 4 bits."""
        sevens = words[:, None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127
        return cls.sign_words(sevens.astype(np.uint8), words >> 28)

    @classmethod
    def of(
        cls, entries: np.ndarray, signs: np.ndarray, scales: np.ndarray, d: np.ndarray, shape: tuple[int, int]
    ) -> Self:
        """Return a weight of these parts.

        Args:
            entries: uint16 [blocks, 256 / cell].
            signs: uint8 [blocks, 32], of 8 elements each, the first in the lowest bit.
            scales: uint8 [blocks, groups].
            d: float16 [blocks].
            shape: (out, in).
        """
        words = cls.sign_words(signs, scales.reshape(-1))
        return cls(entries.astype(np.uint8).reshape(-1), words, d, codebook_words(cls.format), shape)

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Self:
        d, words = cls.split(rows, 2)
        pairs = words.view("<u4").reshape(-1, 2)
        codes, signs = np.ascontiguousarray(pairs[:, 0]).view(np.uint8), cls.from_sevens(pairs[:, 1])
        return cls(codes, signs, d.view("<f2").reshape(-1), codebook_words(cls.format), shape)


@dataclass(frozen=True)
class Iq3XxsArray(Iq2XxsArray):
    """A weight in IQ3_XXS: as Iq2XxsArray, with cells of 4. Element = d * (2 * scale + 1) / 4 * entry."""

    format: ClassVar[str] = "iq3_xxs"
    gguf_type: ClassVar[str] = "IQ3_XXS"
    block_bytes: ClassVar[int] = 2 + 64 + 32  # d, entries, signs and scales
    cell: ClassVar[int] = 4
    factor: ClassVar[float] = 0.25

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Self:
        d, codes, words = cls.split(rows, 2, 64)
        signs, heads = cls.from_sevens(words.view("<u4").reshape(-1)), d.view("<f2").reshape(-1)
        return cls(codes.reshape(-1), signs, heads, codebook_words(cls.format), shape)


@dataclass(frozen=True)
class Iq2XsArray(Iq2XxsArray):
    """A weight in IQ2_XS.

    codes: uint8 [out * in / 8], the low 8 bits of each cell's entry. signs, d, grid: as in Iq2XxsArray, but the highest
    4 bits of `signs` are the ninth bits of four entries. scales: uint8 [out * in / 32], of 4 bits each.
    """

    format: ClassVar[str] = "iq2_xs"
    gguf_type: ClassVar[str] = "IQ2_XS"
    block_bytes: ClassVar[int] = 2 + 64 + 8  # d, entries with signs, scales

    scales: Array

    def layout(self) -> Iterator[tuple[str, int, str]]:
        yield from super().layout()
        yield "scales", self.count // 32, "u8"

    def constants(self) -> dict[str, bool | int | float]:
        return super().constants() | {"FORM": 1}

    def _entries_of(self, blocks: slice) -> np.ndarray:
        words = self.signs.reshape(-1, 8)[blocks]
        high = (words[..., None] >> np.arange(28, 32, dtype=np.uint32) & 1).reshape(-1, 32)
        entries: np.ndarray = super()._entries_of(blocks).astype(np.uint16) | high.astype(np.uint16) << 8
        return entries

    def _scales_of(self, blocks: slice, compute: np.dtype) -> np.ndarray:
        return self._scaled(self.d[blocks], unpack(self.scales.reshape(-1, 8)[blocks], 4), compute)

    @classmethod
    def groups(cls) -> int:
        return 16

    @classmethod
    def of(
        cls, entries: np.ndarray, signs: np.ndarray, scales: np.ndarray, d: np.ndarray, shape: tuple[int, int]
    ) -> Self:
        ninth = pack(entries >> 8, 1).reshape(-1, 1) >> np.array([0, 4], np.uint8) & 15
        words, codes = cls.sign_words(signs, ninth.reshape(-1)), (entries & 255).astype(np.uint8).reshape(-1)
        return cls(codes, words, d, codebook_words(cls.format), shape, scales=pack(scales, 4))

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Self:
        d, words, scales = cls.split(rows, 2, 64)
        words = words.view("<u2")
        d = d.view("<f2").reshape(-1)
        return cls.of(words & 511, (words >> 9).astype(np.uint8), unpack(scales, 4), d, shape)


@dataclass(frozen=True)
class Iq2SArray(Iq2XxsArray):
    """A weight in IQ2_S.

    codes, d, grid: as in Iq2XsArray. signs: uint32 [out * in / 32], all of them, in the order of `reordered`. high:
    uint8 [out * in / 16]: for each 32 elements the high 2 bits of four entries, then two scales of 4 bits.
    """

    format: ClassVar[str] = "iq2_s"
    gguf_type: ClassVar[str] = "IQ2_S"
    block_bytes: ClassVar[int] = 2 + 32 + 32 + 8 + 8  # d, entries, signs, high bits, scales

    high: Array

    def layout(self) -> Iterator[tuple[str, int, str]]:
        yield from super().layout()
        yield "high", self.count // 16, "u8"

    def constants(self) -> dict[str, bool | int | float]:
        return super().constants() | {"FORM": 2}

    def _entries_of(self, blocks: slice) -> np.ndarray:
        low = self.codes.reshape(-1, BLOCK // self.cell)[blocks]
        return _with_high(low, self._high_and_scales(blocks)[0], self._high_bits())

    def _high_and_scales(self, blocks: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return the high bits of entries and the scales, packed: uint8 [blocks, bytes]."""
        pairs = self.high.reshape(-1, 8, 2)[blocks]
        return np.ascontiguousarray(pairs[..., 0]), np.ascontiguousarray(pairs[..., 1])

    def _scales_of(self, blocks: slice, compute: np.dtype) -> np.ndarray:
        return self._scaled(self.d[blocks], unpack(self._high_and_scales(blocks)[1], 4), compute)

    @classmethod
    def groups(cls) -> int:
        return 16

    @classmethod
    def even(cls) -> bool:
        return False

    @classmethod
    def _high_bits(cls) -> int:
        return cls.cell // 4

    @classmethod
    def of(
        cls, entries: np.ndarray, signs: np.ndarray, scales: np.ndarray, d: np.ndarray, shape: tuple[int, int]
    ) -> Self:
        high = np.stack([pack(entries >> 8, cls._high_bits()), pack(scales, 4)], axis=1)
        return cls._joined(entries, signs, d, high.reshape(-1), shape)

    @classmethod
    def _joined(
        cls, entries: np.ndarray, signs: np.ndarray, d: np.ndarray, high: np.ndarray, shape: tuple[int, int]
    ) -> Self:
        codes = (entries & 255).astype(np.uint8).reshape(-1)
        words = cls.reordered(np.ascontiguousarray(signs).reshape(-1).view("<u4"))
        return cls(codes, words, d, codebook_words(cls.format), shape, high=high)

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Self:
        d, codes, signs, high, scales = cls.split(rows, 2, 32, 32, 8)
        entries = _with_high(codes, high, cls._high_bits())
        return cls.of(entries, signs, unpack(scales, 4), d.view("<f2").reshape(-1), shape)


@dataclass(frozen=True)
class Iq3SArray(Iq2SArray):
    """A weight in IQ3_S.

    As Iq2SArray, with cells of 4 and a scale for each 32 elements. high: uint8 [3 * out * in / 64], twelve for each 256
    elements: the ninth bits of 64 entries, then eight scales of 4 bits. Element = d * (2 * scale + 1) * entry.
    """

    format: ClassVar[str] = "iq3_s"
    gguf_type: ClassVar[str] = "IQ3_S"
    block_bytes: ClassVar[int] = 2 + 64 + 8 + 32 + 4  # d, entries, high bits, signs, scales
    cell: ClassVar[int] = 4
    factor: ClassVar[float] = 1.0
    moves: ClassVar[tuple[tuple[int, int], ...]] = ((6, 0xCC00CC), (3, 0x0A0A0A0A))

    def layout(self) -> Iterator[tuple[str, int, str]]:
        for part, size, kind in super().layout():
            yield part, self.count // 64 * 3 if part == "high" else size, kind

    def constants(self) -> dict[str, bool | int | float]:
        return super().constants() | {"NIBBLES": True}

    def _high_and_scales(self, blocks: slice) -> tuple[np.ndarray, np.ndarray]:
        both = self.high.reshape(-1, 12)[blocks]
        return np.ascontiguousarray(both[:, :8]), np.ascontiguousarray(both[:, 8:])

    @classmethod
    def groups(cls) -> int:
        return 8

    @classmethod
    def of(
        cls, entries: np.ndarray, signs: np.ndarray, scales: np.ndarray, d: np.ndarray, shape: tuple[int, int]
    ) -> Self:
        parts = pack(entries >> 8, cls._high_bits()).reshape(-1, 8), pack(scales, 4).reshape(-1, 4)
        return cls._joined(entries, signs, d, np.concatenate(parts, axis=1).reshape(-1), shape)

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Self:
        d, codes, high, signs, scales = cls.split(rows, 2, 64, 8, 32)
        entries = _with_high(codes, high, cls._high_bits())
        return cls.of(entries, signs, unpack(scales, 4), d.view("<f2").reshape(-1), shape)


def _with_high(codes: np.ndarray, high: np.ndarray, bits: int) -> np.ndarray:
    """Return uint16 entries, given their low bytes and their packed high bits."""
    entries: np.ndarray = codes.astype(np.uint16) | unpack(high, bits).astype(np.uint16) << 8
    return entries


def _even(words: np.ndarray) -> np.ndarray:
    """Return words in the devices' order whose highest 4 bits, the last signs of four cells, make the numbers of
    negative elements even."""
    words = words & 0x0FFFFFFF
    odd = words ^ words >> 16
    odd ^= odd >> 8
    odd ^= odd >> 4
    signs: np.ndarray = words | odd << 28
    return signs
