"""Frozen weights that are dequantized, or put in blocks, before their GEMM."""

from __future__ import annotations

import numpy as np

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP
from wgrad.wgsl.formats.formats import KINDS
from wgrad.wgsl.formats.quantize import decode, decode_in_blocks
from wgrad.wgsl.runtime.runtime import Runtime

LEAST_ROWS = 64  # with more, an array in blocks pays
Form = tuple[np.dtype, bool]  # dtype, and whether values are in blocks (`decode_in_blocks`)


def dequantized(device: Runtime, weight: FrozenWeight, form: Form) -> Array:
    """Return the weight's values in a form: kept, from the cache, or decoded now."""

    def decoded() -> Array:
        dtype, in_blocks = form
        return decode_in_blocks(device, weight) if in_blocks else decode(device, weight, dtype)

    return device.dequantized.get(weight, form, decoded)


def in_blocks(device: Runtime, weight: Array) -> Array:
    """Return a 16-bit array as float16, in the order of `decode_in_blocks`. Its sides are multiples of 16."""
    y = device.empty(weight.shape, np.dtype(np.float16))
    count = weight.size // 8
    constants = {"B_KIND": KINDS[weight.dtype_name]}
    params = [count, weight.shape[1]]
    device.launch(
        "gemm_matrix_blocks", [weight, y], params, device.groups(count, GROUP), constants, work=2.0 * y.nbytes
    )
    return y
