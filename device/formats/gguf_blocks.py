"""Common parts of the GGUF formats: rows of whole blocks, values in float32, and codes of 4 bits.

A file has each block's scales beside its codes, in sizes that no word of 32 bits divides. Here codes and scales lie
apart, and codes in the order of their elements, so that what is decoded at once can be read at once; no bit is added.
Source: ggml's dequantize_row_* (github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import numpy as np

from wgrad.device.formats.frozen_weight import Array, FrozenWeight

_DTYPES = {"u8": np.uint8, "u32": np.uint32, "f16": np.float16}  # of a layout


@dataclass(frozen=True)
class GgufBlocks(FrozenWeight):
    """A frozen [out, in] weight of one of GGUF's formats, on a device; `in` is a multiple of `block`."""

    unit: ClassVar[int] = 8
    block_bytes: ClassVar[int]  # of a block in a file

    value_dtype: str = field(default="float32", init=False)

    @property
    def count(self) -> int:
        return int(self.shape[0]) * int(self.shape[1])

    def arrays(self) -> dict[str, Array | None]:
        return {name: getattr(self, name) for name, _, _ in self.layout()}

    def rules(self) -> Iterator[tuple[bool, str]]:
        columns = int(self.shape[1])
        yield (
            columns % self.block == 0,
            f"shape must have rows of whole blocks of {self.block}, got {columns} elements",
        )

    def constants(self) -> dict[str, bool | int | float]:
        return {}

    def parameters(self) -> tuple[int, ...]:
        return ()

    @classmethod
    def empty(cls, shape: tuple[int, int], make: Callable[[tuple[int, ...], Any], Array]) -> Self:
        """A weight to be written to. make: an array of a shape and dtype."""
        bare: Any = cls(**{field.name: None for field in fields(cls) if field.init} | {"shape": shape})
        parts = {name: make((size,), _DTYPES[kind]) for name, size, kind in bare.layout()}
        result: Self = replace(bare, **parts)
        return result

    def repeated(self, rows: int) -> Self:
        """A weight of that many rows, which are this one's over and over; in NumPy."""
        few: Any = self
        many = replace(few, shape=(rows, self.shape[1]))
        parts = {part: np.resize(getattr(self, part), size) for part, size, _ in many.layout()}
        result: Self = replace(many, **parts)
        return result

    def blocks_of(self, first: int, last: int) -> slice:
        """Those of rows first..last."""
        return slice(first * self.shape[1] // self.block, last * self.shape[1] // self.block)

    @classmethod
    def split(cls, rows: np.ndarray, *sizes: int) -> list[np.ndarray]:
        """The parts of each block of a file, of so many bytes and the rest: uint8 [blocks, bytes]."""
        parts = np.split(rows.reshape(-1, cls.block_bytes), np.cumsum(sizes), axis=1)
        return [np.ascontiguousarray(part) for part in parts]


def nibbles_in_order(codes: np.ndarray, run: int) -> np.ndarray:
    """Codes of 4 bits as a file has them (of `run` bytes the low nibbles, then the high ones) -> as devices do: element
    2j in the low nibble of byte j. uint8, of any shape -> flat."""
    runs = codes.reshape(-1, run)
    low, high = runs & 15, runs >> 4
    return np.concatenate([low[:, ::2] | low[:, 1::2] << 4, high[:, ::2] | high[:, 1::2] << 4], axis=1).reshape(-1)


def in_order(data: np.ndarray, run: int, bits: int) -> np.ndarray:
    """Fields of `bits` as a file has them (of `run` bytes the lowest fields, then the next) -> as `pack` makes them."""
    runs = data.reshape(-1, 1, run) >> np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return pack(runs & np.uint8((1 << bits) - 1), bits)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Numbers 0 to 15 -> uint8 of half as many."""
    codes = codes.astype(np.uint8).reshape(-1)
    return codes[::2] | codes[1::2] << 4


def unpack(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [..., n] -> uint8 [..., n * 8 / bits], of fields of `bits` from the lowest bit on."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    fields = codes[..., None] >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(*codes.shape[:-1], codes.shape[-1] * shifts.size)


def pack(fields: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `unpack`, flat."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    packed: np.ndarray = np.bitwise_or.reduce(fields.astype(np.uint8).reshape(-1, shifts.size) << shifts, axis=1)
    return packed


def nearest_level(values: np.ndarray, scales: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """uint8, of values' shape: the code of the level that comes nearest to each, once divided by its scale."""
    scales = scales.astype(np.float32)
    scaled = values / np.where(scales == 0, np.float32(1), scales)
    order = np.argsort(levels, kind="stable")
    middles = (levels[order][1:] + levels[order][:-1]) / 2
    codes: np.ndarray = order[np.searchsorted(middles, scaled)].astype(np.uint8)
    return codes


@dataclass(frozen=True)
class LevelBlocks(GgufBlocks):
    """Codes of 4 bits that stand for sixteen `levels`, with a factor for each `group` elements.

    codes: uint8 [out * in / 2], element 2j in the low nibble of byte j. scales: what the factors are made from.
    """

    levels: ClassVar[np.ndarray]
    group: ClassVar[int]

    codes: Array
    scales: Array
    shape: tuple[int, int]

    def constants(self) -> dict[str, bool | int | float]:
        return {f"LEVEL_{i}": float(level) for i, level in enumerate(self.levels)}

    def rows(self, first: int, last: int, compute: np.dtype) -> np.ndarray:
        blocks = self.blocks_of(first, last)
        codes = unpack(self.codes.reshape(-1, self.block // 2)[blocks], 4).reshape(-1, self.group)
        values = self.levels.astype(compute)[codes] * self.group_scales(blocks, compute).reshape(-1, 1)
        result: np.ndarray = values.reshape(-1, self.shape[1])
        return result

    @abstractmethod
    def group_scales(self, blocks: slice, compute: np.dtype) -> np.ndarray:
        """The factor of each group's levels."""
