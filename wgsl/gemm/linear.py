"""GEMM with a frozen weight of any format, forward and backward."""

from __future__ import annotations

import numpy as np

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.memory import Array
from wgrad.wgsl.formats.formats import WeightForm
from wgrad.wgsl.gemm import gemm_int8
from wgrad.wgsl.gemm.dequantized import dequantized
from wgrad.wgsl.gemm.gemm import launch, matmul
from wgrad.wgsl.gemm.gemm_epilogue import Epilogue
from wgrad.wgsl.gemm.plan import Gemm, plan_on
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
    end = Epilogue(out, bias=bias, residual=residual, lowrank=lowrank, parts=weight.parts)
    return _times_weight(device, x, weight, end, trans_b=True)


@implements("linear_quantized_backward")
def linear_quantized_backward(
    device: Runtime, dy: Array, weight: FrozenWeight, lowrank: tuple[Array, Array] | None, dtype: np.dtype
) -> Array:
    # A gradient's LoRA term is one for all parts.
    end = Epilogue(device.empty((dy.shape[0], weight.shape[1]), dtype), lowrank=lowrank)
    return _times_weight(device, dy, weight, end, trans_b=False)


def _times_weight(device: Runtime, x: Array, weight: FrozenWeight, end: Epilogue, *, trans_b: bool) -> Array:
    mnk, form = (x.shape[0], end.out.shape[1], x.shape[1]), WeightForm.of(weight)
    chosen = plan_on(device, Gemm(mnk, x.dtype_name, form, end.out.dtype_name, trans_b=trans_b))
    if chosen.shader == "gemm_int8":
        gemm_int8.launch(device, chosen.splits, chosen.k_per_split, x, weight, end, trans_b=trans_b)
    elif chosen.dequantized:
        dtype, blocks = np.dtype(chosen.dequantized), chosen.gemm.in_blocks
        array = dequantized(device, weight, (dtype, blocks))
        matmul(device, x, array, end, trans_b=trans_b, in_blocks=blocks)
    else:
        launch(device, chosen, x, weight, end)
    return end.out
