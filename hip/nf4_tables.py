"""The number tables of NF4 and of its double quantisation, value for value as bitsandbytes has them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from wgrad.device.memory import Array

NESTED_BLOCK_SIZE = 256


@dataclass(frozen=True)
class NF4Blocks:
    """The fields of autograd's NF4Array, which wraps it: the rooms know each other only by these names."""

    packed: Array
    absmax: Array
    shape: tuple[int, int]
    block_size: int = 64
    nested_absmax: Array | None = None
    nested_code: Array | None = None
    nested_offset: Array | None = None
    nested_block_size: int = NESTED_BLOCK_SIZE
    value_dtype: str = "float32"


@cache
def dynamic_map() -> np.ndarray:
    """The signed 8-bit dynamic data type, float32 [256], rising: after the sign, 0 to 6 zero bits choose the decade
    from 1 down to 1e-6, the bits left a linear fraction of it: the middles of equal parts of [0.1, 1]; and 0 and 1.

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2022), section 2.2. Bitsandbytes builds it in
    float32 with torch.linspace, which steps from both ends to the middle; so does this, to the bit.
    """
    values: list[np.ndarray] = [np.zeros(1, np.float32), np.ones(1, np.float32)]
    for decade in range(7):
        parts = 2**decade
        start, stop = np.float32(0.1), np.float32(1)
        step = float(np.float32((stop - start) / np.float32(parts)))
        i = np.arange(parts + 1)
        edges = np.where(i < (parts + 1) // 2, float(start) + step * i, float(stop) - step * (parts - i))
        edges = edges.astype(np.float32)
        middles = (edges[:-1] + edges[1:]) / np.float32(2) * np.float32(10.0 ** (decade - 6))
        values += [middles, -middles]
    return np.sort(np.concatenate(values))


def thresholds(levels: np.ndarray) -> np.ndarray:
    return (levels[:-1] + levels[1:]) / np.float32(2)
