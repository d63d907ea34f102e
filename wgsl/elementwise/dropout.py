"""Dropout with counter-based random numbers (Philox-4x32-10): the same keep bits on every device. Its own backward."""

from __future__ import annotations

import math

from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP, flat_parts, vector_width, wgsl_type
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime


@implements("dropout")
def dropout(device: Runtime, x: Array, p: float, seed: Array, stream: int) -> Array:
    y = device.empty(x.shape, x.dtype)
    vec = vector_width(x.size)
    constants: dict[str, Constant] = {"VEC": vec, "X_T": wgsl_type(x.dtype, vec)}
    for first, (part, out) in flat_parts(device, [x, y]):
        params = [part.size, first // 4, stream & 0xFFFFFFFF, math.floor(p * 2**32), 1.0 - float(p)]
        groups = device.groups(-(-part.size // 4), GROUP)
        device.launch("dropout", [part, seed, out], params, groups, constants, work=2.0 * part.nbytes)
    return y
