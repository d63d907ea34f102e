"""Q2_K and Q3_K: GGUF's blocks of 256 codes of 2 or 3 bits. Each 16 have a scale, and in Q2_K a minimum. Values are
those of ggml's reference.

Source: ggml's dequantize_row_q2_K and dequantize_row_q3_K (github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wgrad.device.formats.frozen_weight import Array
from wgrad.device.formats.gguf_blocks import GgufBlocks, in_order, pack, unpack

GROUPS, GROUP = 16, 16  # groups of a block, and elements of a group, which has one scale


@dataclass(frozen=True)
class Q2KArray(GgufBlocks):
    """A weight in Q2_K.

    codes: uint8 [out * in / 4], four of 2 bits, the first in the lowest bits. scales: uint8 [out * in / 16], a scale in
    the low 4 bits, a minimum in the high 4 bits. d: float16 [out * in / 128], d and dmin of each block. Element = d *
    scale * code - dmin * minimum.
    """

    format: ClassVar[str] = "q2_k"
    gguf_type: ClassVar[str] = "Q2_K"
    block: ClassVar[int] = GROUPS * GROUP
    block_bytes: ClassVar[int] = 16 + 64 + 2 + 2  # scales and minima, codes, d, dmin

    codes: Array
    scales: Array
    d: Array
    shape: tuple[int, int]

    def layout(self) -> Iterator[tuple[str, int, str]]:
        yield "codes", self.count // 4, "u8"
        yield "scales", self.count // GROUP, "u8"
        yield "d", self.count // 128, "f16"

    def constants(self) -> dict[str, bool | int | float]:
        return {"SCALES": 0}

    def rows(self, first: int, last: int, compute: np.dtype) -> np.ndarray:
        blocks = self.blocks_of(first, last)
        codes = unpack(self.codes.reshape(-1, 64)[blocks], 2).reshape(-1, GROUPS, GROUP).astype(compute)
        fields, d = self.scales.reshape(-1, GROUPS)[blocks], self.d.reshape(-1, 2)[blocks].astype(compute)
        scale, least = d[:, :1] * (fields & 15).astype(compute), d[:, 1:] * (fields >> 4).astype(compute)
        values: np.ndarray = (scale[..., None] * codes - least[..., None]).reshape(-1, self.shape[1])
        return values

    @classmethod
    def quantize(cls, w: np.ndarray, block_size: int = 256, double: bool = False) -> Q2KArray:
        """Quantize each group from its smallest value (or 0) to its largest; ggml searches for scales of less error."""
        groups = w.astype(np.float32).reshape(-1, GROUPS, GROUP)
        least = -np.minimum(groups.min(axis=2), 0)
        step = (groups.max(axis=2).clip(0) + least) / np.float32(3)
        d = (np.stack([step.max(axis=1), least.max(axis=1)], axis=1) / np.float32(15)).astype(np.float16)
        wide = np.maximum(d.astype(np.float32), np.float32(1e-30))  # of a block of zeros
        scale, minimum = (np.rint(part / wide[:, i, None]).clip(0, 15) for i, part in enumerate((step, least)))
        size, offset = (d[:, :1].astype(np.float32) * scale)[..., None], d[:, 1:].astype(np.float32) * minimum
        codes = np.rint((groups + offset[..., None]) / np.where(size == 0, 1, size)).clip(0, 3)
        fields = scale.astype(np.uint8) | minimum.astype(np.uint8) << 4
        return cls(pack(codes, 2), fields.reshape(-1), d.reshape(-1), (w.shape[0], w.shape[1]))

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Q2KArray:
        scales, codes, d = cls.split(rows, 16, 64)
        return cls(in_order(codes, 32, 2), scales.reshape(-1), d.view("<f2").reshape(-1), shape)


@dataclass(frozen=True)
class Q3KArray(GgufBlocks):
    """A weight in Q3_K.

    codes: uint8 [out * in / 4], the low 2 bits of four codes, the first in the lowest bits. high: uint8 [out * in / 8],
    the third bit of eight codes. scales: uint32 [out * in * 3 / 256], three of a block: the low 4 bits of groups 0 to
    7, those of 8 to 15, and the high 2 bits of all. d: float16 [out * in / 256]. Element = d * (scale - 32) * (code -
    4).
    """

    format: ClassVar[str] = "q3_k"
    gguf_type: ClassVar[str] = "Q3_K"
    block: ClassVar[int] = GROUPS * GROUP
    block_bytes: ClassVar[int] = 32 + 64 + 12 + 2  # third bits, codes, scales, d

    codes: Array
    high: Array
    scales: Array
    d: Array
    shape: tuple[int, int]

    def layout(self) -> Iterator[tuple[str, int, str]]:
        yield "codes", self.count // 4, "u8"
        yield "high", self.count // 8, "u8"
        yield "scales", self.count // self.block * 3, "u32"
        yield "d", self.count // self.block, "f16"

    def constants(self) -> dict[str, bool | int | float]:
        return {"SCALES": 1}

    def rows(self, first: int, last: int, compute: np.dtype) -> np.ndarray:
        blocks = self.blocks_of(first, last)
        high = unpack(self.high.reshape(-1, 32)[blocks], 1)
        codes = (unpack(self.codes.reshape(-1, 64)[blocks], 2) | high << 2).reshape(-1, GROUPS, GROUP)
        words, group = self.scales.reshape(-1, 3)[blocks], np.arange(GROUPS, dtype=np.uint32)
        fields = words[:, group // 8] >> 4 * (group % 8) & 15 | (words[:, 2, None] >> 2 * group & 3) << 4
        scale = self.d[blocks, None].astype(compute) * (fields.astype(compute) - compute.type(32))
        values: np.ndarray = (scale[..., None] * (codes.astype(compute) - compute.type(4))).reshape(-1, self.shape[1])
        return values

    @classmethod
    def quantize(cls, w: np.ndarray, block_size: int = 256, double: bool = False) -> Q3KArray:
        """Quantize each group so that its largest value has code 0; ggml searches for scales of less error."""
        groups = w.astype(np.float32).reshape(-1, GROUPS, GROUP)
        steps = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[..., None], axis=2)[..., 0] / np.float32(-4)
        d = (np.abs(steps).max(axis=1) / np.float32(31)).astype(np.float16)
        wide = np.maximum(d.astype(np.float32), np.float32(1e-30))[:, None]  # of a block of zeros
        scales = np.rint(steps / wide).clip(-32, 31)
        size = (scales * d[:, None].astype(np.float32))[..., None]
        codes = (np.rint(groups / np.where(size == 0, 1, size)).clip(-4, 3) + 4).astype(np.uint8)
        words = _words((scales + 32).astype(np.uint32))
        return cls(pack(codes & 3, 2), pack(codes >> 2, 1), words, d, (w.shape[0], w.shape[1]))

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Q3KArray:
        high, codes, fields, d = cls.split(rows, 32, 64, 12)
        low = np.concatenate([fields[:, :8] & 15, fields[:, :8] >> 4], axis=1)
        top = np.concatenate([fields[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
        words = _words((low | top << 4).astype(np.uint32))
        return cls(in_order(codes, 32, 2), in_order(high, 32, 1), words, d.view("<f2").reshape(-1), shape)


def _words(fields: np.ndarray) -> np.ndarray:
    """Pack scales of 6 bits [blocks, 16] into `scales` of Q3KArray."""
    group = np.arange(GROUPS, dtype=np.uint32)
    low, high = (fields & 15) << 4 * (group % 8), (fields >> 4) << 2 * group
    words = [low[:, :8].sum(axis=1), low[:, 8:].sum(axis=1), high.sum(axis=1)]
    return np.stack(words, axis=1).astype(np.uint32).reshape(-1)
