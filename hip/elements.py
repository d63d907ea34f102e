"""Shared by the HIP operators: their table, the type codes of elements.hpp, sizes of launches."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from wgrad.device.errors import DeviceError
from wgrad.device.implementations import Implementations
from wgrad.device.memory import Array
from wgrad.hip.runtime.runtime import Runtime

GROUP = 256  # work-items of a work-group
PER = 8  # elements per work-item
_CODES = {"float32": 0, "float16": 1, "bfloat16": 2}

implements = Implementations(lacks={"place_experts", "keep_experts", "gather_experts", "copy_experts"})


@cache
def type_code(dtype: Any) -> int:
    """Return a dtype's code in elements.hpp: 0 float32, 1 float16, 2 bfloat16.

    Raises:
        DeviceError: another dtype.
    """
    name = np.dtype(dtype).name
    if name not in _CODES:
        raise DeviceError(f"dtype {name} is not one that the HIP kernels read; use float32, float16 or bfloat16")
    return _CODES[name]


def type_codes(*arrays: Array | None) -> int:
    """Return the arrays' type codes, four bits each, the first lowest; None counts as float32."""
    return sum((0 if a is None else type_code(a.dtype)) << 4 * i for i, a in enumerate(arrays))


def eights(n: int) -> tuple[int, int, int]:
    """Return the grid for n elements, eight per work-item."""
    return Runtime.groups(n, GROUP * PER)
