"""Dropout with counter-based random numbers. Kernel: dropout.hip."""

from __future__ import annotations

import math

from wgrad.device.memory import Array
from wgrad.hip.elements import eights, implements, type_codes
from wgrad.hip.runtime.launch import Long
from wgrad.hip.runtime.runtime import Runtime


@implements("dropout")
def dropout(device: Runtime, x: Array, p: float, seed: Array, stream: int) -> Array:
    y = device.empty(x.shape, x.dtype)
    arguments = [x, seed, y, Long(x.size), stream, math.floor(p * 2**32), float(1 - p), type_codes(x, y)]
    device.launch("dropout", "dropout", arguments, eights(x.size), work=2 * x.nbytes)
    return y
