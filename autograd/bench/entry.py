"""One benchmark of `wgrad bench`: an operator, and how its arguments are made on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgrad.device.contract import Array, Device

F32 = np.dtype(np.float32)
_BLOCK = 1 << 16  # random numbers that large arrays repeat


@dataclass(frozen=True)
class Entry:
    """One call of an operator. build: device -> its arguments by name. name: of the row; no two have the same."""

    op: str
    variant: str
    shape: str
    dtype: str
    build: Callable[[Device], dict[str, Any]]

    @property
    def name(self) -> str:
        return "/".join(part for part in (self.op, self.variant, self.shape, self.dtype) if part)


@dataclass(frozen=True)
class Sizes:
    """How large the work is: of the memory-bound operators rows and columns, of square products the sides, of linear
    layers (M, N, K), few_rows: of a square one, with the last of the sides; of attention (B, T, H, G, D), of decoding
    the keys in the cache, of the loss (N, V, C); of experts their number, how many a token has, width and hidden
    size."""

    name: str
    rows: int
    columns: int
    sides: tuple[int, ...]
    linear: tuple[int, int, int]
    few_rows: tuple[int, ...]
    attention: tuple[tuple[int, int, int, int, int], ...]
    keys: int
    loss: tuple[int, int, int]
    experts: tuple[int, int, int, int]
    memory_bytes: int  # of each array of the memory roof: beyond caches

    @property
    def tokens(self) -> int:
        return min(self.rows, 2048)


SIZES = {
    "large": Sizes(
        "large", 8192, 4096, (128, 256, 512, 1024, 4096), (2048, 14336, 4096), (16, 64, 256),
        ((1, 2048, 32, 8, 64), (1, 2048, 32, 8, 128)), 8192, (2048, 49152, 2048), (128, 8, 768, 2048),
        256 << 20,
    ),
    "small": Sizes(
        "small", 256, 1024, (128, 256, 512), (128, 512, 256), (16, 64),
        ((1, 256, 4, 2, 64),), 512, (64, 2048, 128), (8, 2, 96, 256), 16 << 20,
    ),
    "tiny": Sizes(
        "tiny", 16, 128, (32, 64), (16, 64, 64), (3,), ((1, 32, 2, 1, 64),), 32, (16, 128, 32),
        (3, 2, 32, 32), 64 << 10,
    ),
}  # fmt: skip


def normal(device: Device, shape: Sequence[int], dtype: Any = F32, seed: int = 0, scale: float = 1.0) -> Array:
    """Random numbers without a second copy of a large array on the host: one block repeated."""
    block = (scale * np.random.default_rng(seed).standard_normal(_BLOCK)).astype(dtype)
    return device.upload(np.resize(block, tuple(shape)))


def times(*sizes: int) -> str:
    return "x".join(map(str, sizes))


def entry(op: str, shape: Sequence[int], dtype: Any, build: Callable[..., dict[str, Any]], variant: str = "") -> Entry:
    return Entry(op, variant, times(*shape), np.dtype(dtype).name, build)
