"""NVFP4: blocks of 16 codes of 4 bits (E2M1) with one scale of 8 bits (E4M3 without a sign); values as in ggml.

Source: ggml's dequantize_row_nvfp4 (github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from wgrad.device.formats.gguf_blocks import (
    LevelBlocks,
    nearest_level,
    nibbles_in_order,
    pack_nibbles,
)
from wgrad.device.formats.mxfp4 import LEVELS

GROUP = 16  # elements of a scale
_NAN = 127  # read as 0, as in ggml


def _half_scales() -> np.ndarray:
    """Return float64 [256]: half of each byte's scale, since LEVELS are twice the values of the codes."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7)) / 2
    values[_NAN] = 0
    return values


_SCALES = _half_scales()


@dataclass(frozen=True)
class Nvfp4Array(LevelBlocks):
    """A weight in NVFP4.

    codes: uint8 [out * in / 2], element 2j in the low nibble of byte j. scales: uint8 [out * in / 16], E4M3. Element i
    is the value of its code times scales[i // 16].
    """

    format: ClassVar[str] = "nvfp4"
    gguf_type: ClassVar[str] = "NVFP4"
    block: ClassVar[int] = 64
    block_bytes: ClassVar[int] = 4 + 32  # scales, codes
    levels: ClassVar[np.ndarray] = LEVELS
    group: ClassVar[int] = GROUP

    def layout(self) -> Iterator[tuple[str, int, str]]:
        yield "codes", self.count // 2, "u8"
        yield "scales", self.count // GROUP, "u8"

    def constants(self) -> dict[str, bool | int | float]:
        return super().constants() | {"SCALES": 2}

    def group_scales(self, blocks: slice, compute: np.dtype) -> np.ndarray:
        scales: np.ndarray = _SCALES.astype(compute)[self.scales.reshape(-1, 4)[blocks]]
        return scales

    @classmethod
    def quantize(cls, w: np.ndarray, block_size: int = 64, double: bool = False) -> Nvfp4Array:
        """Quantize with the scale nearest to a group's largest value / 6, and the nearest codes."""
        groups = w.astype(np.float32).reshape(-1, GROUP)
        wanted = np.abs(groups).max(axis=1) / np.float32(LEVELS.max())
        scales = np.searchsorted((_SCALES[1:126] + _SCALES[:125]) / 2, wanted).astype(np.uint8)
        codes = nearest_level(groups, _SCALES.astype(np.float32)[scales[:, None]], LEVELS)
        return cls(pack_nibbles(codes), scales, (w.shape[0], w.shape[1]))

    @classmethod
    def from_gguf(cls, rows: np.ndarray, shape: tuple[int, int]) -> Nvfp4Array:
        scales, codes = cls.split(rows, 4)
        return cls(nibbles_in_order(codes, 8), scales.reshape(-1), shape)
