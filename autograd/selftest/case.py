"""The list of cases by which a device is judged: every operator of the contract, forward and backward.

A case builds its inputs on the host, calls one operator and returns what it made. `selftest.check_case` runs it on a
device, on the reference in the same precision and on the reference in float64, and compares. Sizes divide nothing
on purpose; a few round ones are there because devices have fast paths for them.
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

    build: random generator -> named inputs: NumPy arrays and frozen weights of NumPy arrays.
    call: device, the same names with the arrays on that device -> named outputs (device arrays).
    finish: name of the host's arithmetic between `call` and what is judged (finish.py).
    ulps: floor of the limit, in units of float32's epsilon of an output's largest value: what a right implementation
        may differ by from the order of a sum and from the shading language's own functions.
    cancels: size of the terms that cancel in an output which is exactly 0: epsilons are counted of it there.
    compute_units: kernels are chosen as for a card of so many, by a device that asks (`planned_for`); 0: as it is.
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
        """The same inputs every time: the generator is seeded with the case's name."""
        return self.build(np.random.default_rng(zlib.crc32(self.name.encode())))


# exp, log, tanh and division: Vulkan allows exp an error of 3 + 2 |x| units in the last place.
BUILTIN_ULPS = 16.0


@contextmanager
def switched(device: Any, name: str, value: Any) -> Iterator[None]:
    """The device with its switch of this name so, where it has one."""
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
    """Copies in float64 for the oracle; integers stay as they are."""
    return {
        n: map_arrays(v, lambda a: a.astype(np.float64) if is_float(a.dtype) else a.copy()) for n, v in inputs.items()
    }


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = F32, scale: float = 1.0) -> np.ndarray:
    """Normal numbers with a mean that is not zero, so that a forgotten term shows."""
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
