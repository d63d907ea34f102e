"""Common parts of the GGUF formats: rows of whole blocks, values in float32, and codes of 4 bits.

In a file, the scales of a block are next to its codes, and a block is often not a multiple of 32-bit words. Here codes
and scales are separate arrays, and codes are in the order of their elements, so that a kernel reads at once what it
decodes at once. No bit is added.

Source: ggml's dequantize_row_* (github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import numpy as np

from wgrad.device.formats.frozen_weight import Array, FrozenWeight

_DTYPES = {"u8": np.uint8, "u32": np.uint32, "f16": np.float16}  # by their names in `layout`


@dataclass(frozen=True)
class GgufBlocks(FrozenWeight):
    """A frozen [out, in] weight in a GGUF format, on a device. `in` is a multiple of `block`."""

    unit: ClassVar[int] = 8
    block_bytes: ClassVar[int]  # bytes of a block in a file

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
        """Return a weight whose arrays are to be written. make: returns an array of a shape and dtype."""
        bare: Any = cls(**{field.name: None for field in fields(cls) if field.init} | {"shape": shape})
        parts = {name: make((size,), _DTYPES[kind]) for name, size, kind in bare.layout()}
        result: Self = replace(bare, **parts)
        return result

    def repeated(self, rows: int) -> Self:
        """Return a weight with `rows` rows, which repeat those of this one, in NumPy."""
        few: Any = self
        many = replace(few, shape=(rows, self.shape[1]))
        parts = {part: np.resize(getattr(self, part), size) for part, size, _ in many.layout()}
        result: Self = replace(many, **parts)
        return result

    def blocks_of(self, first: int, last: int) -> slice:
        """Return the blocks of rows first to last - 1."""
        return slice(first * self.shape[1] // self.block, last * self.shape[1] // self.block)

    @classmethod
    def split(cls, rows: np.ndarray, *sizes: int) -> list[np.ndarray]:
        """Split the blocks of a file into parts of these sizes in bytes, and the rest: uint8 [blocks, bytes] each."""
        parts = np.split(rows.reshape(-1, cls.block_bytes), np.cumsum(sizes), axis=1)
        return [np.ascontiguousarray(part) for part in parts]


def nibbles_in_order(codes: np.ndarray, run: int) -> np.ndarray:
    """Reorder codes of 4 bits from a file's order to that of devices, which has element 2j in the low nibble of byte j.

    A file has the elements of the low nibbles of `run` bytes, then those of the high nibbles. codes: uint8 of any
    shape; the result is flat.
    """
    runs = codes.reshape(-1, run)
    low, high = runs & 15, runs >> 4
    return np.concatenate([low[:, ::2] | low[:, 1::2] << 4, high[:, ::2] | high[:, 1::2] << 4], axis=1).reshape(-1)


def in_order(data: np.ndarray, run: int, bits: int) -> np.ndarray:
    """Reorder fields of `bits` bits from a file's order (the lowest of `run` bytes, then the next) to `pack`'s."""
    runs = data.reshape(-1, 1, run) >> np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return pack(runs & np.uint8((1 << bits) - 1), bits)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Pack pairs of numbers from 0 to 15 into uint8."""
    codes = codes.astype(np.uint8).reshape(-1)
    return codes[::2] | codes[1::2] << 4


def unpack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Split bytes into fields of `bits` bits, the lowest first: uint8 [..., n] to uint8 [..., n * 8 / bits]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    fields = codes[..., None] >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(*codes.shape[:-1], codes.shape[-1] * shifts.size)


def pack(fields: np.ndarray, bits: int) -> np.ndarray:
    """Undo `unpack`; the result is flat."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    packed: np.ndarray = np.bitwise_or.reduce(fields.astype(np.uint8).reshape(-1, shifts.size) << shifts, axis=1)
    return packed


def nearest_level(values: np.ndarray, scales: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return the code of the level nearest to each value / scale: uint8 of the shape of `values`."""
    scales = scales.astype(np.float32)
    scaled = values / np.where(scales == 0, np.float32(1), scales)
    order = np.argsort(levels, kind="stable")
    middles = (levels[order][1:] + levels[order][:-1]) / 2
    codes: np.ndarray = order[np.searchsorted(middles, scaled)].astype(np.uint8)
    return codes


@dataclass(frozen=True)
class LevelBlocks(GgufBlocks):
    """A weight with codes of 4 bits for sixteen `levels`, and a factor for each `group` elements.

    codes: uint8 [out * in / 2], element 2j in the low nibble of byte j. scales: the factors, as the format stores them.
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
        """Return the factor of each group."""
