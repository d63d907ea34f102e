"""Cases of the self-test: calls of an operator, forward or backward, by which a device is judged.

A case builds its inputs on the host, calls one operator and returns the outputs. `selftest.check_case` compares the
outputs of a device, of the reference in the same precision, and of the reference in float64. Sizes deliberately divide
nothing, except for some round ones, for which devices have fast paths.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from wgrad.device.contract import Array, Device
from wgrad.device.formats.frozen_weight import FrozenWeight

Inputs = dict[str, Any]
Outputs = dict[str, Array]

F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Case:
    """One call of one operator.

    build: returns the inputs by name, NumPy arrays and frozen weights of NumPy arrays, given a random generator.
    call: calls the operator with a device and the inputs on it, and returns the outputs (device arrays) by name.
    finish: name of the arithmetic on the host that computes the judged outputs from those of `call` (finish.py).
    ulps: floor of the limit, in units of float32's epsilon times an output's largest value. It allows for the order of
        sums and the precision of the shading language's functions.
    cancels: size of the terms that cancel in an output that is exactly 0; `ulps` then refer to it.
    compute_units: number of compute units for which devices with `planned_for` choose kernels; 0: their own.
    """

    name: str
    op: str
    direction: str  # "forward" or "backward"
    dtype: str
    shape: str
    build: Callable[[np.random.Generator], Inputs]
    call: Callable[[Device, Inputs], Outputs]
    ulps: float = 4.0
    finish: str = ""
    compute_units: int = 0
    cancels: float = 0.0

    def inputs(self) -> Inputs:
        """Return the inputs, the same each time: the case's name seeds the generator."""
        return self.build(np.random.default_rng(zlib.crc32(self.name.encode())))


# For exp, log, tanh and division: Vulkan allows exp an error of 3 + 2 |x| units in the last place.
BUILTIN_ULPS = 16.0


@contextmanager
def switched(device: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of the device within the block, if it has this attribute."""
    if not hasattr(device, name):
        yield
        return
    before = getattr(device, name)
    setattr(device, name, value)
    try:
        yield
    finally:
        setattr(device, name, before)


def map_arrays(value: Any, change: Callable[[np.ndarray], Any]) -> Any:
    """Apply `change` to an array, or to each array of a frozen weight."""
    if not isinstance(value, FrozenWeight):
        return change(value)
    return value.map_arrays(change)


def is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype == BF16


def upload_inputs(device: Device, inputs: Inputs) -> Inputs:
    return {name: map_arrays(value, device.upload) for name, value in inputs.items()}


def widen_inputs(inputs: Inputs) -> Inputs:
    """Copy the inputs in float64 for the oracle; integers keep their dtype."""
    return {
        n: map_arrays(v, lambda a: a.astype(np.float64) if is_float(a.dtype) else a.copy()) for n, v in inputs.items()
    }


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = F32, scale: float = 1.0) -> np.ndarray:
    """Return normal numbers whose mean is not zero, so that a missing term shows."""
    return (scale * (rng.standard_normal(shape) + 0.1)).astype(dtype)


def dtype_name(dtype: Any) -> str:
    result: str = np.dtype(dtype).name
    return result


def forward_and_backward(op: str, shape: str, dtype: str, build: Any, forward: Any, backward: Any) -> list[Case]:
    back = f"{op}_backward"
    return [
        Case(f"{op}/{shape}/{dtype}", op, "forward", dtype, shape, build, forward, BUILTIN_ULPS),
        Case(f"{back}/{shape}/{dtype}", back, "backward", dtype, shape, build, backward, BUILTIN_ULPS),
    ]
