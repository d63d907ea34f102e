"""Products with a frozen weight of any format, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.memory import Array
from wgrad.wgsl.formats.quantize import decode
from wgrad.wgsl.gemm import gemm_int8, gemm_matrix, gemv
from wgrad.wgsl.gemm.gemm import matmul, product
from wgrad.wgsl.operators import implements
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
    added = {"bias": bias, "residual": residual, "lowrank": lowrank}
    return _times_weight(device, x, weight, out, trans_b=True, **added)


@implements("linear_quantized_backward")
def linear_quantized_backward(
    device: Runtime, dy: Array, weight: FrozenWeight, lowrank: tuple[Array, Array] | None, dtype: np.dtype
) -> Array:
    out = device.empty((dy.shape[0], weight.shape[1]), dtype)
    return _times_weight(device, dy, weight, out, trans_b=False, lowrank=lowrank)


# On matrix units a weight is decoded once, before its product, where rows are more than these, which two of the tallest
# tiles hold; with fewer every tile of rows decodes it. With as many, where the product of arrays fills the card.
_DECODE_FIRST_ROWS = 512


def _times_weight(device: Runtime, x: Array, weight: FrozenWeight, out: Array, *, trans_b: bool, **added: Any) -> Array:
    if device.int8_products and gemm_int8.served(device, weight, x.shape[0]):
        gemm_int8.times_weight(device, x, weight, out, trans_b=trans_b, **added)
        return out
    # A gradient's LoRA term is one for all parts.
    options = {"trans_b": trans_b, "parts": weight.parts if trans_b else (), **added}
    mnk = (x.shape[0], out.shape[1], x.shape[1])
    few_rows = gemv.served(x.shape[0], False, trans_b, 1)
    if weight.shape[1] % weight.unit or (device.software and not few_rows):
        # A row would start inside a unit of codes; or decoding once is cheaper than once a tile.
        matmul(device, x, _decoded(device, weight, np.dtype(np.float32)), out, **options)
    elif _decode_first(device, mnk) and _on_units(device, x, weight, out, mnk, trans_b):
        product(device, x, _decoded(device, weight, np.dtype(np.float16)), out, mnk, **options)
    else:
        product(device, x, weight, out, mnk, **options)
    return out


def _decoded(device: Runtime, weight: FrozenWeight, dtype: np.dtype) -> Array:
    return device.held.get(weight, dtype, lambda: decode(device, weight, dtype))


def _decode_first(device: Runtime, mnk: tuple[int, int, int]) -> bool:
    if mnk[0] != _DECODE_FIRST_ROWS:
        return mnk[0] > _DECODE_FIRST_ROWS
    return gemm_matrix.choose_tile(*mnk, 1, device.workgroup_bytes) == (gemm_matrix.LARGE, 1)


def _on_units(
    device: Runtime, x: Array, weight: FrozenWeight, out: Array, mnk: tuple[int, int, int], trans_b: bool
) -> bool:
    """Return whether matrix units take the product, with a weight whose decoded values fit one binding."""
    fits = 2 * weight.shape[0] * weight.shape[1] <= device.max_binding_bytes
    return device.matrix_units and fits and gemm_matrix.served(x, weight, out, mnk, False, trans_b, x.shape[1])
