"""Self-test cases of log-odds: small and large probabilities, those next to 1, and invalid ones."""

from __future__ import annotations

import numpy as np

from wgrad.autograd.selftest.case import Case, Inputs, Outputs, dtype_name, forward_and_backward, normal
from wgrad.device.contract import Device


def cases(t: np.dtype) -> list[Case]:
    found = []
    for shape in ((7, 123), (1, 3), (33, 128)):

        def build(rng: np.random.Generator, shape: tuple[int, int] = shape) -> Inputs:
            x = -np.exp(rng.uniform(np.log(2.0**-9), np.log(20.0), shape))
            x.flat[:2] = 0.0, 3.0
            return {"x": x.astype(t), "dy": normal(rng, shape, t)}

        def forward(device: Device, x: Inputs) -> Outputs:
            return {"y": device.log_odds(x["x"])}

        def backward(device: Device, x: Inputs) -> Outputs:
            return {"dx": device.log_odds_backward(x["dy"], x["x"])}

        text = "x".join(map(str, shape))
        found += forward_and_backward("log_odds", text, dtype_name(t), build, forward, backward)
    return found
