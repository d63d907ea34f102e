"""Self-test calls of dropout, which are part of the cases of elementwise.py and take their inputs."""

from __future__ import annotations

from collections.abc import Callable

from wgrad.autograd.selftest.case import Inputs
from wgrad.device.contract import Array, Device

CALLS: dict[str, Callable[[Device, Inputs], Array]] = {
    "dropout": lambda device, x: device.dropout(x["x"], 0.3, x["seed"], 7),
    "dropout 0.05": lambda device, x: device.dropout(x["x"], 0.05, x["seed"], 123456789),
}
