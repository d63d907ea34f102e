"""Linear recurrences in chunks, one segment of the sequence at a time: the shared launches (chunks.hpp)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from wgrad.device.contract import DELTA_CHUNK, delta_segments
from wgrad.device.memory import Array
from wgrad.hip.elements import type_codes
from wgrad.hip.runtime.runtime import Runtime

STEPS = 8  # up to so many tokens a state is updated token by token


@dataclass
class Call:
    """The arguments of one call, and its launches. other: y or its gradient."""

    source: ClassVar[str]  # of the kernels

    device: Runtime
    qkv: Array
    gates: tuple[Array, Array, Array, Array]  # g, beta, doc_start, cache_len
    other: Array
    key_heads: int
    keys: int

    def __post_init__(self) -> None:
        (self.batch, self.tokens, self.heads), self.width = self.gates[0].shape, self.other.shape[3]
        self.rows = self.batch * self.heads
        self.size = self.rows * self.keys * self.width  # of a state of all heads
        self.tiles = -(-self.width // DELTA_CHUNK)

    @property
    def segments(self) -> list[tuple[int, int]]:
        return delta_segments(self.rows, self.tokens)

    @property
    def places(self) -> int:
        """Tokens of a segment, padded to chunks, times heads."""
        return self.rows * self.segments[0][1] * DELTA_CHUNK

    def states_before(self) -> Array:
        """Return an array for the states before every segment."""
        return self.device.empty((len(self.segments), self.batch, self.heads, self.keys, self.width))

    def launch(
        self,
        kernel: str,
        arrays: Sequence[Any],
        segment: tuple[int, int],
        grid: tuple[int, int, int],
        flop: float,
    ) -> None:
        """Launch a kernel. arrays: the arguments after the sizes; flop: per token and head."""
        at, chunks = segment
        sizes: list[Any] = [self.qkv, self.batch, self.tokens, self.heads, self.key_heads, self.keys, self.width]
        sizes += [at, chunks, type_codes(self.qkv, self.other)]
        work = flop * self.rows * chunks * DELTA_CHUNK
        self.device.launch(self.source, kernel, [*sizes, *arrays], grid, work=work)

    def launch_channels(self, kernel: str, arrays: Sequence[Any], segment: tuple[int, int], flop: float) -> None:
        """Launch a kernel with one work-group per token of the segment."""
        at, chunks = segment
        grid = (min(chunks * DELTA_CHUNK, self.tokens - at), self.batch, 1)
        self.launch(kernel, arrays, segment, grid, flop)


def from_element(array: Array, element: int) -> Array:
    """Return a view of a float32 array from an element on."""
    return Array(array.lease, array.offset + element * 4, (array.size - element,), np.dtype(np.float32))
