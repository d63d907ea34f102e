"""Frozen weights that are dequantized before their GEMM."""

from __future__ import annotations

import numpy as np

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.memory import Array
from wgrad.wgsl.formats.quantize import decode, decode_in_blocks
from wgrad.wgsl.runtime.runtime import Runtime

Form = tuple[np.dtype, bool]  # dtype, and whether values are in blocks (`decode_in_blocks`)


def dequantized(device: Runtime, weight: FrozenWeight, form: Form) -> Array:
    """Return the weight's values in a form: kept, from the cache, or decoded now."""

    def decoded() -> Array:
        dtype, in_blocks = form
        return decode_in_blocks(device, weight) if in_blocks else decode(device, weight, dtype)

    return device.dequantized.get(weight, form, decoded)
