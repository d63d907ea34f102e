"""Self-test cases of GEMMs with operands rounded to 8 bits (`Device.round_products`).

The error of rounding is far above that of arithmetic. So the operands are chosen to have none: integers from -127 to
127 times a power of 2, with a 127 in each block. The results are then judged like those of any other GEMM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from wgrad.autograd.selftest.case import F16, F32, Case, Inputs, Outputs, switched
from wgrad.autograd.selftest.linear import frozen_case
from wgrad.device.contract import Device
from wgrad.device.formats.frozen_weight import formats


def int8_cases(float16: bool) -> list[Case]:
    """Return the cases for devices that have such GEMMs."""
    epilogue: dict[str, Any] = {"bias": True, "residual": F32, "dtype": F32}
    shapes: list[tuple[str, int, int, int, dict[str, Any]]] = [
        ("int8", 133, 100, 224, {}),
        ("int8 lowrank", 260, 132, 96, {"rank": 20}),
        ("int8 long", 128, 64, 2112, {}),
        ("int8 long lowrank", 130, 70, 1056, {"rank": 16}),
        ("int8 across", 133, 200, 96, {"backward": True}),
        ("int8 across lowrank", 260, 72, 160, {"backward": True, "rank": 16}),
        ("int8 across long", 130, 2080, 64, {"backward": True}),
    ]
    found = [_case("q8_0", name, m, n, k, F32, options) for name, m, n, k, options in shapes]
    found.append(_case("q8_0", "int8 epilogue", 131, 72, 160, F32, epilogue))
    for backward in (False, True):
        nested = {"backward": backward, "double": True}
        found.append(_case("nf4", f"int8{' across' * backward}", 133, 136, 200, F32, nested))
        if float16:
            found.append(_case("q8_0", f"int8{' across' * backward}", 133, 136, 160, F16, {"backward": backward}))
    return found


def _case(format: str, variant: str, m: int, n: int, k: int, dtype: np.dtype, options: dict[str, Any]) -> Case:
    plain = frozen_case(format, variant, m, n, k, dtype, **options)
    inner = n if options.get("backward") else k

    def build(rng: np.random.Generator) -> Inputs:
        x, values = _integers(rng, (m, inner)), _integers(rng, (n, k))
        if format == "nf4":  # only its largest level, its least and 0 are multiples of one number
            values = np.where(values == 127, values, 127 * rng.integers(-1, 2, values.shape))
        weight = formats()[format].quantize((values / 1024).astype(np.float32), 64, options.get("double", False))
        return plain.build(rng) | {"x": (x / 32).astype(dtype), "weight": weight}

    def call(device: Device, inputs: Inputs) -> Outputs:
        with switched(device, "int8_products", True):
            return plain.call(device, inputs)

    return replace(plain, build=build, call=call, ulps=plain.ulps + inner**0.5 / 4)


def _integers(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Return integers from -127 to 127. Any eight neighbors in a row or a column include 127."""
    values = rng.integers(-127, 128, shape)
    rows, columns = np.indices(shape)
    values[(rows - columns) % 8 == 0] = 127
    return values
