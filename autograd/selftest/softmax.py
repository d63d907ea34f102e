"""Self-test cases of softmax."""

from __future__ import annotations

import numpy as np

from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.case import Case, Inputs, Outputs, dtype_name, forward_and_backward, normal
from wgrad.device.contract import Device


def cases(t: np.dtype) -> list[Case]:
    found = []
    for shape in ((5, 123), (41, 7), (3, 1003), (9, 64)):

        def build(rng: np.random.Generator, shape: tuple[int, int] = shape) -> Inputs:
            x = normal(rng, shape, t, 3.0)
            if shape[1] == 7:  # far below the zeros that a faulty device reads beyond a row
                x -= t.type(200)
            return {"x": x, "y": ReferenceDevice().softmax(x), "dy": normal(rng, shape, t)}

        def forward(device: Device, x: Inputs) -> Outputs:
            return {"y": device.softmax(x["x"])}

        def backward(device: Device, x: Inputs) -> Outputs:
            return {"dx": device.softmax_backward(x["dy"], x["y"])}

        found += forward_and_backward("softmax", "x".join(map(str, shape)), dtype_name(t), build, forward, backward)
    return found
