"""IQ4_NL and IQ4_XS: GGUF's codes of 4 bits for sixteen uneven levels. Values are those of ggml's reference.

Source: ggml's dequantize_row_iq4_nl and dequantize_row_iq4_xs (github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from wgrad.device.formats.gguf_blocks import (
    LevelBlocks,
    nearest_level,
    nibbles_in_order,
    pack_nibbles,
)

LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
GROUPS, GROUP = 8, 32  # groups of a block of IQ4_XS, and elements of a group, which has one scale


@dataclass(frozen=True)
class Iq4NlArray(LevelBlocks):
    """A weight in IQ4_NL.

    codes: uint8 [out * in / 2], element 2j in the low nibble of byte j. scales: float16 [out * in / 32]. Element i is
    LEVELS[code] * scales[i // 32].
    """

    format: ClassVar[str] = "iq4_nl"
    gguf_type: ClassVar[str] = "IQ4_NL"
    block: ClassVar[int] = GROUP
    block_bytes: ClassVar[int] = 2 + 16  # scale, codes
    levels: ClassVar[np.ndarray] = LEVELS
    group: ClassVar[int] = GROUP

    def layout(self) -> Iterator[tuple[str, int, str]]:
        yield "codes", self.count // 2, "u8"
        yield "scales", self.count // GROUP, "f16"

    def constants(self) -> dict[str, bool | int | float]:
        return super().constants() | {"SCALES": 0}

    def group_scales(self, blocks: slice, compute: np.dtype) -> np.ndarray:
        scales: np.ndarray = self.scales[blocks].astype(compute)
        return scales

    @classmethod
    def quantize(cls, w: np.ndarray, block_size: int = 32, double: bool = False) -> Self:
        """Quantize each group from its largest value; ggml searches for scales of less error."""
        blocks = w.astype(np.float32).reshape(-1, GROUP)
        largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
        scales = (largest / LEVELS[0]).astype(np.float16)
        return cls(pack_nibbles(nearest_level(blocks, scales, LEVELS)), scales.reshape(-1), (w.shape[0], w.shape[1]))

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Self:
        scales, codes = cls.split(rows, 2)
        return cls(nibbles_in_order(codes, 16), scales.view("<f2").reshape(-1), shape)


@dataclass(frozen=True)
class Iq4XsArray(Iq4NlArray):
    """A weight in IQ4_XS.

    codes: as in Iq4NlArray. scales: uint32 [out * in / 128], two words for a block of 256: the float16 d (low half) and
    the high 2 bits of each group's scale; then the low 4 bits of each. Element = d * (scale - 32) * LEVELS[code].
    """

    format: ClassVar[str] = "iq4_xs"
    gguf_type: ClassVar[str] = "IQ4_XS"
    block: ClassVar[int] = GROUPS * GROUP
    block_bytes: ClassVar[int] = 2 + 2 + 4 + 128  # d, high bits, low bits of scales, codes

    def layout(self) -> Iterator[tuple[str, int, str]]:
        yield "codes", self.count // 2, "u8"
        yield "scales", self.count // 128, "u32"

    def constants(self) -> dict[str, bool | int | float]:
        return super().constants() | {"SCALES": 1}

    def finite_parts(self) -> Iterator[np.ndarray]:
        yield np.ascontiguousarray(self.scales.reshape(-1, 2)[:, 0]).view(np.float16)[::2]

    def group_scales(self, blocks: slice, compute: np.dtype) -> np.ndarray:
        words, group = self.scales.reshape(-1, 2)[blocks], np.arange(GROUPS, dtype=np.uint32)
        d = (words[:, 0] & 0xFFFF).astype(np.uint16).view(np.float16)[:, None].astype(compute)
        scales = words[:, 1, None] >> 4 * group & 15 | (words[:, 0, None] >> (2 * group + 16) & 3) << 4
        values: np.ndarray = d * (scales.astype(compute) - compute.type(32))
        return values

    @classmethod
    def quantize(cls, w: np.ndarray, block_size: int = 256, double: bool = False) -> Self:
        groups = w.astype(np.float32).reshape(-1, GROUPS, GROUP)
        largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[..., None], axis=2)[..., 0] / LEVELS[0]
        top = np.take_along_axis(largest, np.abs(largest).argmax(axis=1)[:, None], axis=1)
        d = (top / np.float32(-32)).astype(np.float16)
        wide = np.where(d == 0, np.float16(1), d).astype(np.float32)
        whole = np.rint(largest / wide).clip(-32, 31)
        codes = nearest_level(groups, (whole * d.astype(np.float32))[..., None], LEVELS)
        fields, group = (whole + 32).astype(np.uint32), np.arange(GROUPS, dtype=np.uint32)
        low = ((fields & 15) << 4 * group).sum(axis=1, dtype=np.uint32)
        high = ((fields >> 4) << 2 * group).sum(axis=1, dtype=np.uint32)
        words = np.stack([d[:, 0].view(np.uint16) | high << 16, low], axis=1)
        return cls(pack_nibbles(codes), words.astype(np.uint32).reshape(-1), (w.shape[0], w.shape[1]))

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Self:
        scales, codes = cls.split(rows, 8)
        return cls(nibbles_in_order(codes, 16), scales.view("<u4").reshape(-1), shape)
