"""Work that reaches a limit of a device, with which `wgrad bench` measures its peak rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TENSOR_CORES = "tensor cores"  # name of their peak rate: 16-bit operands, float32 sums


@dataclass(frozen=True)
class Expectation:
    """A model's lower bound for the time of an operator.

    bound: "arithmetic" or "memory". share: share of the peak rate of arithmetic that its kernels can reach.
    """

    seconds: float
    bound: str
    share: float


@dataclass(frozen=True)
class Roof:
    """A peak rate to measure. name: float32, float16 (packed), int8 (dot products of four) or TENSOR_CORES. flop: of
    one `run`, which returns an array of results."""

    name: str
    flop: float
    run: Callable[[], Any]
