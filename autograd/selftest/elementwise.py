"""Self-test cases of elementwise operators, and of dropout, which takes the same inputs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from wgrad.autograd.selftest import dropout
from wgrad.autograd.selftest.case import BF16, F16, F32, Case, Inputs, Outputs, dtype_name, normal
from wgrad.device.contract import Array, Device

Call = Callable[[Device, Inputs], Array]


def cases(t: np.dtype) -> list[Case]:
    """Return cases of operators of one line, which have the same inputs."""
    name = dtype_name(t)
    calls: dict[str, Call] = {
        "mask": lambda device, x: device.mask(x["x"], x["keep"], -7.5),
        "add": lambda device, x: device.add(x["x"], x["y"]),
        "add in place": lambda device, x: device.add(x["x"], x["y"], out=x["x"]),
        "add into the second": lambda device, x: device.add(x["x"], x["y"], out=x["y"]),
        "mul": lambda device, x: device.mul(x["x"], x["y"]),
        "scale": lambda device, x: device.scale(x["x"], -0.37),
        "scale_by": lambda device, x: device.scale_by(x["x"], x["factor"]),
        "softcap": lambda device, x: device.softcap(x["x"], 1.3),
        "cast to float32": lambda device, x: device.cast(x["x"], F32),
        "cast from bfloat16": lambda device, x: device.cast(x["bf16"], t),
        "bias": lambda device, x: device.bias(x["x"], x["b"]),
        "sum_rows": lambda device, x: device.sum_rows(x["x"]),
        "sum_rows accumulate": lambda device, x: device.sum_rows(x["x"], out=x["b"], accumulate=True),
        "sum": lambda device, x: device.sum(x["x"]),
        **dropout.CALLS,
    }
    if t == F16:
        calls["cast to float16"] = lambda device, x: device.cast(x["f32"], F16)
        calls["add float32"] = lambda device, x: device.add(x["x"], x["f32"])
        calls["add to float32"] = lambda device, x: device.add(x["f32"], x["x"], out=x["f32"])
    found = []
    for variant, call in calls.items():
        for shape in ((7, 123), (129, 64), (1, 1)):

            def build(rng: np.random.Generator, shape: tuple[int, int] = shape) -> Inputs:
                return {
                    "x": normal(rng, shape, t),
                    "y": normal(rng, shape, t),
                    "f32": normal(rng, shape, F32),
                    "bf16": normal(rng, shape, BF16),
                    "b": normal(rng, shape[1:], F32),
                    "keep": (rng.random(shape) < 0.6).astype(np.uint32),
                    "factor": np.array([1.7], np.float32),
                    "seed": rng.integers(0, 2**32, 2).astype(np.uint32),
                }

            def run(device: Device, x: Inputs, call: Call = call) -> Outputs:
                return {"y": call(device, x)}

            text = "x".join(map(str, shape))
            found.append(Case(f"{variant}/{text}/{name}", variant.split()[0], "forward", name, text, build, run))
    return found
