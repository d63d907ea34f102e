"""One benchmark of `wgrad bench`: an operator, and how its arguments are made on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgrad.device.contract import Array, Device

F32 = np.dtype(np.float32)
_BLOCK = 1 << 16  # number of random numbers, which large arrays repeat


@dataclass(frozen=True)
class Entry:
    """One call of an operator. build: returns its arguments on a device by name. name: unique name of the row."""

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
    """Sizes of the benchmarks.

    Attributes:
        name: Name of these sizes.
        rows, columns: Of memory-bound operators.
        sides: Of square products.
        linear: M, N, K of linear layers.
        few_rows: Row counts of square linear layers, whose side is the last of `sides`.
        attention: B, T, H, G, D.
        keys: Keys in the cache in decoding.
        loss: N, V, C of the loss.
        experts: Number of experts, experts of a token, width of an expert, hidden size.
        memory_bytes: Bytes of each array that measures memory: larger than caches.
    """

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
    memory_bytes: int

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
    """Upload random numbers: one repeated block, which saves a second large array on the host."""
    block = (scale * np.random.default_rng(seed).standard_normal(_BLOCK)).astype(dtype)
    return device.upload(np.resize(block, tuple(shape)))


def times(*sizes: int) -> str:
    return "x".join(map(str, sizes))


def entry(op: str, shape: Sequence[int], dtype: Any, build: Callable[..., dict[str, Any]], variant: str = "") -> Entry:
    return Entry(op, variant, times(*shape), np.dtype(dtype).name, build)
