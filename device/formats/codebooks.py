"""IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS and IQ3_S: GGUF's blocks of 256 elements in cells of 8 or 4. A cell is an entry of
the format's codebook with signs and a scale. Values are those of ggml's reference.

codebooks.npy holds the codebooks one after another, with a uint16 for each entry. An element takes 2 bits (cells of 8)
or 3 bits (cells of 4), the first in the lowest bits, and is an index into the values in `_TABLES`. The codebooks are
part of the file format.

Source: ggml's dequantize_row_iq2_xxs and those of the others, and its tables (github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import numpy as np

from wgrad.device.formats.frozen_weight import Array
from wgrad.device.formats.gguf_blocks import GgufBlocks, pack, unpack
from wgrad.device.host_matmul import host_matmul

BLOCK, _CHUNK = 256, 512  # _CHUNK: cells that are matched at once, whose distances fit into a CPU cache


class _Table(NamedTuple):
    """A codebook of `entries` cells with `cell` elements each, whose magnitudes are in `values`."""

    entries: int
    cell: int
    values: tuple[int, ...]


_TWOS, _THREES = (8, 25, 43), (4, 12, 20, 28, 36, 44, 52, 62)
_TABLES = {  # in the order of codebooks.npy
    "iq2_xxs": _Table(256, 8, _TWOS),
    "iq2_xs": _Table(512, 8, _TWOS),
    "iq2_s": _Table(1024, 8, _TWOS),
    "iq3_xxs": _Table(256, 4, _THREES),
    "iq3_s": _Table(512, 4, tuple(range(1, 16, 2))),
    "iq1_s": _Table(2048, 8, (0, 1, 2)),  # indices of the values -1, 0, 1 (iq1.py)
}


@cache
def packed_codebook(format: str) -> np.ndarray:
    """Return a format's codebook as codebooks.npy has it: uint16 [entries]."""
    place = list(_TABLES).index(format)
    begin = sum(table.entries for table in list(_TABLES.values())[:place])
    found: np.ndarray = np.load(Path(__file__).with_name("codebooks.npy"))[begin : begin + _TABLES[format].entries]
    return found


@cache
def codebook_words(format: str) -> np.ndarray:
    """Return a format's codebook for devices, as uint32 words.

    An entry of 8 elements takes 16 bits, as in codebooks.npy. An entry of 4 elements takes 16 bits if the elements fit
    into 4 bits each, else a word with 5 bits for half of each element.
    """
    if _TABLES[format].cell == 8:
        return packed_codebook(format).view("<u4")
    values, small = codebook(format).astype(np.uint32), max(_TABLES[format].values) < 16
    bits = 4 if small else 5
    words = ((values if small else values >> 1) << np.arange(0, 4 * bits, bits, dtype=np.uint32)).sum(axis=1)
    found: np.ndarray = words.astype("<u2").view("<u4") if small else words.astype("<u4")
    return found


@cache
def codebook(format: str) -> np.ndarray:
    """Return the elements of a format's codebook, without signs: uint8 [entries, cell]."""
    table = _TABLES[format]
    bits = 2 if table.cell == 8 else 3
    shifts = np.arange(table.cell, dtype=np.uint16) * np.uint16(bits)
    numbers = packed_codebook(format)[:, None] >> shifts & np.uint16((1 << bits) - 1)
    values: np.ndarray = np.array(table.values, np.uint8)[numbers]
    return values


def nearest_entries(cells: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return for each row of `cells` the index of the table's entry with the smallest squared error."""
    table = table.astype(np.float32)
    middles = (table**2).sum(axis=1) / 2
    parts = np.split(cells, range(_CHUNK, len(cells), _CHUNK))
    return np.concatenate([(host_matmul(part, table.T) - middles).argmax(axis=1) for part in parts])


@dataclass(frozen=True)
class Iq2XxsArray(GgufBlocks):
    """A weight in IQ2_XXS.

    codes: uint8 [out * in / 8], the entry of each cell of 8. signs: uint32 [out * in / 32], for each of four cells the
    signs of its first seven elements (the last sign makes the number of negative ones even), then 4 bits of a scale. d:
    float16 [out * in / 256]. grid: uint32, the codebook. Element = d * (2 * scale + 1) / 8 * entry.
    """

    format: ClassVar[str] = "iq2_xxs"
    gguf_type: ClassVar[str] = "IQ2_XXS"
    block: ClassVar[int] = BLOCK
    block_bytes: ClassVar[int] = 2 + 64  # d; four entries, signs and a scale for each 32
    cell: ClassVar[int] = 8
    factor: ClassVar[float] = 0.125

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
        halves = 2 if self.format == "iq3_xxs" else 1  # its codebook holds halves
        return {"CELL": self.cell, "FACTOR": halves * self.factor, "FORM": 0, "TABLE_WORDS": words}

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
        sevens = words[..., None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127
        return unpack(even_signs(sevens.astype(np.uint8)).reshape(len(words), -1), 1)

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
        sevens = (signs & 127).reshape(-1, 4).astype(np.uint32) << np.arange(0, 28, 7, dtype=np.uint32)
        words = sevens.sum(axis=1, dtype=np.uint32) | scales.reshape(-1).astype(np.uint32) << 28
        return cls(entries.astype(np.uint8).reshape(-1), words, d, codebook_words(cls.format), shape)

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Self:
        d, words = cls.split(rows, 2)
        pairs = words.view("<u4").reshape(-1, 2)
        codes, signs = np.ascontiguousarray(pairs[:, 0]).view(np.uint8), np.ascontiguousarray(pairs[:, 1])
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
        signs, heads = words.view("<u4").reshape(-1), d.view("<f2").reshape(-1)
        return cls(codes.reshape(-1), signs, heads, codebook_words(cls.format), shape)


@dataclass(frozen=True)
class Iq2XsArray(Iq2XxsArray):
    """A weight in IQ2_XS.

    codes: uint8 [out * in / 8], the low 8 bits of each cell's entry. signs: uint8 [out * in / 8], the signs of a cell's
    first seven elements, then the ninth bit of its entry. d: uint8, ten for each 256 elements: the float16 d, and 16
    scales of 4 bits. grid: as in Iq2XxsArray.
    """

    format: ClassVar[str] = "iq2_xs"
    gguf_type: ClassVar[str] = "IQ2_XS"
    block_bytes: ClassVar[int] = 2 + 64 + 8  # d, entries with signs, scales

    def layout(self) -> Iterator[tuple[str, int, str]]:
        yield "codes", self.count // self.cell, "u8"
        yield "signs", self.count // 8, "u8"
        yield "d", self.count // BLOCK * (2 + self.groups() // 2), "u8"
        yield "grid", codebook_words(self.format).size, "u32"

    def constants(self) -> dict[str, bool | int | float]:
        return super().constants() | {"FORM": 1}

    def _entries_of(self, blocks: slice) -> np.ndarray:
        high = self.signs.reshape(-1, 32)[blocks] >> 7
        entries: np.ndarray = super()._entries_of(blocks).astype(np.uint16) | high.astype(np.uint16) << 8
        return entries

    def _signs_of(self, blocks: slice) -> np.ndarray:
        signs = self.signs.reshape(-1, 32)[blocks]
        return unpack(even_signs(signs & 127) if self.even() else signs, 1)

    def _scales_of(self, blocks: slice, compute: np.dtype) -> np.ndarray:
        heads = self.d.reshape(-1, 2 + self.groups() // 2)[blocks]
        d = np.ascontiguousarray(heads[:, :2]).view(np.float16)[:, 0]
        return self._scaled(d, unpack(heads[:, 2:], 4), compute)

    @classmethod
    def groups(cls) -> int:
        return 16

    @classmethod
    def of(
        cls, entries: np.ndarray, signs: np.ndarray, scales: np.ndarray, d: np.ndarray, shape: tuple[int, int]
    ) -> Self:
        signs = signs & 127 | (entries >> 8).astype(np.uint8) << 7
        codes, heads = (entries & 255).astype(np.uint8).reshape(-1), _heads(d, scales)
        return cls(codes, signs.reshape(-1), heads, codebook_words(cls.format), shape)

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Self:
        d, words, scales = cls.split(rows, 2, 64)
        words = words.view("<u2")
        d = d.view("<f2").reshape(-1)
        return cls.of(words & 511, (words >> 9).astype(np.uint8), unpack(scales, 4), d, shape)


@dataclass(frozen=True)
class Iq2SArray(Iq2XsArray):
    """A weight in IQ2_S.

    As Iq2XsArray, but `signs` has all 8 signs of a cell. high: uint8 [out * in / 32], the high 2 bits of four entries.
    """

    format: ClassVar[str] = "iq2_s"
    gguf_type: ClassVar[str] = "IQ2_S"
    block_bytes: ClassVar[int] = 2 + 32 + 32 + 8 + 8  # d, entries, signs, high bits, scales

    high: Array

    def layout(self) -> Iterator[tuple[str, int, str]]:
        yield from super().layout()
        yield "high", self.count // 32, "u8"

    def constants(self) -> dict[str, bool | int | float]:
        return super().constants() | {"FORM": 2}

    def _entries_of(self, blocks: slice) -> np.ndarray:
        low = self.codes.reshape(-1, BLOCK // self.cell)[blocks]
        return _with_high(low, self.high.reshape(-1, 8)[blocks], self._high_bits())

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
        codes, high = (entries & 255).astype(np.uint8), pack(entries >> 8, cls._high_bits())
        table = codebook_words(cls.format)
        return cls(codes.reshape(-1), signs.reshape(-1), _heads(d, scales), table, shape, high=high)

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Self:
        d, codes, signs, high, scales = cls.split(rows, 2, 32, 32, 8)
        return cls.of(
            _with_high(codes, high, cls._high_bits()), signs, unpack(scales, 4), d.view("<f2").reshape(-1), shape
        )


@dataclass(frozen=True)
class Iq3SArray(Iq2SArray):
    """A weight in IQ3_S.

    As Iq2SArray, with cells of 4 and a scale for each 32 elements. high: the ninth bit of eight entries. Element = d *
    (2 * scale + 1) * entry.
    """

    format: ClassVar[str] = "iq3_s"
    gguf_type: ClassVar[str] = "IQ3_S"
    block_bytes: ClassVar[int] = 2 + 64 + 8 + 32 + 4  # d, entries, high bits, signs, scales
    cell: ClassVar[int] = 4
    factor: ClassVar[float] = 1.0

    @classmethod
    def groups(cls) -> int:
        return 8

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Self:
        d, codes, high, signs, scales = cls.split(rows, 2, 64, 8, 32)
        return cls.of(
            _with_high(codes, high, cls._high_bits()), signs, unpack(scales, 4), d.view("<f2").reshape(-1), shape
        )


def _with_high(codes: np.ndarray, high: np.ndarray, bits: int) -> np.ndarray:
    """Return uint16 entries, given their low bytes and their packed high bits."""
    entries: np.ndarray = codes.astype(np.uint16) | unpack(high, bits).astype(np.uint16) << 8
    return entries


def even_signs(sevens: np.ndarray) -> np.ndarray:
    """Return bytes with the bit 7 that makes the number of set bits even. sevens: uint8 of 7 bits."""
    odd = sevens ^ sevens >> 4
    odd ^= odd >> 2
    odd ^= odd >> 1
    signs: np.ndarray = sevens | (odd & 1) << 7
    return signs


def _heads(d: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return `d` of Iq2XsArray. d: float16 [blocks]; scales: of 4 bits, [blocks, groups]."""
    fields = pack(scales, 4).reshape(len(d), -1)
    return np.concatenate([np.ascontiguousarray(d).view(np.uint8).reshape(-1, 2), fields], axis=1).reshape(-1)
