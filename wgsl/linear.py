"""Products with a frozen weight of any format, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.memory import Array
from wgrad.wgsl import gemv
from wgrad.wgsl.gemm import matmul, product
from wgrad.wgsl.operators import implements
from wgrad.wgsl.quantize import decode
from wgrad.wgsl.runtime.runtime import Runtime


@implements("linear_quantized")
def linear_quantized(
    device: Runtime,
    x: Array,
    weight: FrozenWeight,
    bias: Array | None,
    residual: Array | None,
    lowrank: tuple[Array, Array] | None,
    dtype: np.dtype,
) -> Array:
    out = device.empty((x.shape[0], weight.shape[0]), dtype)
    added = {"bias": bias, "residual": residual, "lowrank": lowrank, "parts": weight.parts}
    return _times_weight(device, x, weight, out, trans_b=True, **added)


@implements("linear_quantized_backward")
def linear_quantized_backward(
    device: Runtime, dy: Array, weight: FrozenWeight, lowrank: tuple[Array, Array] | None, dtype: np.dtype
) -> Array:
    out = device.empty((dy.shape[0], weight.shape[1]), dtype)
    return _times_weight(device, dy, weight, out, trans_b=False, lowrank=lowrank)


def _times_weight(device: Runtime, x: Array, weight: FrozenWeight, out: Array, **options: Any) -> Array:
    few_rows = gemv.served(x.shape[0], False, options["trans_b"], 1)
    if weight.shape[1] % weight.unit or (device.software and not few_rows):
        # A row would start inside a unit of codes; or decoding once is cheaper than once a tile.
        matmul(device, x, decode(device, weight, np.dtype(np.float32)), out, **options)
    else:
        product(device, x, weight, out, (x.shape[0], out.shape[1], x.shape[1]), **options)
    return out
