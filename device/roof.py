"""Work that does nothing but reach one limit of a device: what `wgrad bench` measures its roofs with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TENSOR_CORES = "tensor cores"  # the name of their roof: 16 bits in, sums in float32


@dataclass(frozen=True)
class Expectation:
    """Time that an operator takes at least, by a model.

    bound: "arithmetic" or "memory". share: of the peak rate of arithmetic that its kernels can reach.
    """

    seconds: float
    bound: str
    share: float


@dataclass(frozen=True)
class Roof:
    """name: float32, float16 (packed), int8 (dot products of four) or TENSOR_CORES. flop: of one `run`, which returns
    an array of what came out."""

    name: str
    flop: float
    run: Callable[[], Any]
