"""Q4_K: GGUF's blocks of 256 codes of 4 bits. Each 32 have a scale and a minimum of 6 bits. Values are those of ggml's
reference.

Source: ggml's dequantize_row_q4_K (github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wgrad.device.formats.frozen_weight import Array
from wgrad.device.formats.gguf_blocks import GgufBlocks, nibbles_in_order, pack_nibbles, unpack

GROUPS, GROUP = 8, 32  # groups of a block, and elements of a group, which has a scale and a minimum


@dataclass(frozen=True)
class Q4KArray(GgufBlocks):
    """A weight in Q4_K.

    codes: uint8 [out * in / 2], element 2j in the low nibble of byte j. scales: uint32 [out * in / 64], four of a
    block: the float16 d (low half) and dmin; the low 4 bits of each group's scale; the low 4 bits of each minimum; the
    high 2 bits of the scales, then of the minima. Element = d * scale * code - dmin * minimum.
    """

    format: ClassVar[str] = "q4_k"
    gguf_type: ClassVar[str] = "Q4_K"
    block: ClassVar[int] = GROUPS * GROUP
    block_bytes: ClassVar[int] = 2 + 2 + 12 + 128  # d, dmin, scales and minima, codes

    codes: Array
    scales: Array
    shape: tuple[int, int]

    def layout(self) -> Iterator[tuple[str, int, str]]:
        yield "codes", self.count // 2, "u8"
        yield "scales", self.count // 64, "u32"

    def finite_parts(self) -> Iterator[np.ndarray]:
        yield np.ascontiguousarray(self.scales.reshape(-1, 4)[:, 0]).view(np.float16)

    def rows(self, first: int, last: int, compute: np.dtype) -> np.ndarray:
        blocks = self.blocks_of(first, last)
        scale, least = unpack_scales(self.scales.reshape(-1, 4)[blocks], compute)
        codes = self.values_of_codes(blocks).reshape(-1, GROUPS, GROUP).astype(compute)
        values: np.ndarray = (scale[..., None] * codes - least[..., None]).reshape(-1, self.shape[1])
        return values

    def values_of_codes(self, blocks: slice) -> np.ndarray:
        """Return the codes of these blocks: uint8 [blocks, 256]."""
        return unpack(self.codes.reshape(-1, self.block // 2)[blocks], 4)

    @classmethod
    def quantize(cls, w: np.ndarray, block_size: int = 256, double: bool = False) -> Q4KArray:
        """Quantize each group from its smallest value (or 0) to its largest; ggml searches for scales of less error."""
        codes, scales = quantize_groups(w, 15)
        return cls(pack_nibbles(codes), scales, (w.shape[0], w.shape[1]))

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Q4KArray:
        head, groups, codes = cls.split(rows, 4, 12)
        return cls(nibbles_in_order(codes, 32), scales_from_gguf(head, groups), shape)


def quantize_groups(w: np.ndarray, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return codes from 0 to `largest` [blocks, 8, 32], and `scales` of Q4KArray."""
    groups = w.astype(np.float32).reshape(-1, GROUPS, GROUP)
    least = -np.minimum(groups.min(axis=2), 0)
    step = (groups.max(axis=2).clip(0) + least) / np.float32(largest)
    head = np.stack([step.max(axis=1), least.max(axis=1)], axis=1).astype(np.float32) / 63
    head = head.astype(np.float16)
    wide = np.maximum(head.astype(np.float32), np.float32(1e-30))  # of a block of zeros
    fields = [np.rint(part / wide[:, i, None]).clip(0, 63).astype(np.uint8) for i, part in enumerate((step, least))]
    scales = pack_scales(head, *fields)
    scale, offset = unpack_scales(scales.reshape(-1, 4), np.dtype(np.float32))
    scaled = (groups + offset[..., None]) / np.where(scale == 0, 1, scale)[..., None]
    return np.rint(scaled).clip(0, largest), scales


def scales_from_gguf(head: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Convert a GGUF file's scales to `scales` of Q4KArray.

    Args:
        head: uint8 [blocks, 4]: d and dmin.
        groups: uint8 [blocks, 12]: 6 bits of the scales of groups 0 to 3, and of their minima; then the low 4 bits of
            both of groups 4 to 7, whose high 2 bits are in the first eight bytes.
    """
    first, second, low = np.split(groups, 3, axis=1)
    scale = np.concatenate([first & 63, low & 15 | first >> 6 << 4], axis=1)
    least = np.concatenate([second & 63, low >> 4 | second >> 6 << 4], axis=1)
    return pack_scales(head.view("<f2"), scale, least)


def pack_scales(head: np.ndarray, scale: np.ndarray, least: np.ndarray) -> np.ndarray:
    """Pack d and dmin (head: float16 [blocks, 2]), and scales and minima of 6 bits (uint8 [blocks, 8])."""
    group = np.arange(GROUPS, dtype=np.uint32)
    words = np.empty((len(head), 4), np.uint32)
    words[:, 0] = np.ascontiguousarray(head).view(np.uint32)[:, 0]
    scale, least = scale.astype(np.uint32), least.astype(np.uint32)
    words[:, 1] = ((scale & 15) << 4 * group).sum(axis=1)
    words[:, 2] = ((least & 15) << 4 * group).sum(axis=1)
    words[:, 3] = ((scale >> 4) << 2 * group).sum(axis=1) | ((least >> 4) << (2 * group + 16)).sum(axis=1)
    return words.reshape(-1)


def unpack_scales(words: np.ndarray, compute: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return each group's factor and subtrahend (after the product), [blocks, 8]. words: uint32 [blocks, 4]."""
    group = np.arange(GROUPS, dtype=np.uint32)
    head = np.ascontiguousarray(words[:, 0]).view(np.float16).reshape(-1, 2).astype(compute)
    scale = words[:, 1, None] >> 4 * group & 15 | (words[:, 3, None] >> 2 * group & 3) << 4
    least = words[:, 2, None] >> 4 * group & 15 | (words[:, 3, None] >> (2 * group + 16) & 3) << 4
    return head[:, :1] * scale.astype(compute), head[:, 1:] * least.astype(compute)
