"""Matrix products with a frozen weight of some format (device/formats), decoded inside the product. gemm_plan.py says
which kernel serves which; kernels/weight_formats.hpp lists the formats that they have."""

from __future__ import annotations

import numpy as np

from wgrad.device.errors import DeviceError
from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.memory import Array
from wgrad.hip import gemm_plan
from wgrad.hip.elements import implements, type_code
from wgrad.hip.gemm import Epilogue, LowRank, card_of, dense_product, launch_product, multiple
from wgrad.hip.quantize import dequantize
from wgrad.hip.runtime.runtime import Runtime


@implements("linear_quantized")
def linear_quantized(
    device: Runtime,
    x: Array,
    weight: FrozenWeight,
    bias: Array | None,
    residual: Array | None,
    lowrank: LowRank | None,
    dtype: np.dtype,
) -> Array:
    epilogue = Epilogue(1.0, bias, residual, lowrank)
    return _product(device, x, weight, (x.shape[0], weight.shape[0], x.shape[1]), True, dtype, epilogue)


@implements("linear_quantized_backward")
def linear_quantized_backward(
    device: Runtime, dy: Array, weight: FrozenWeight, lowrank: LowRank | None, dtype: np.dtype
) -> Array:
    mnk = (dy.shape[0], weight.shape[1], dy.shape[1])
    return _product(device, dy, weight, mnk, False, dtype, Epilogue(lowrank=lowrank))


def _product(
    device: Runtime,
    x: Array,
    w: FrozenWeight,
    mnk: tuple[int, int, int],
    trans_b: bool,
    dtype: np.dtype,
    epilogue: Epilogue,
) -> Array:
    m, n, k = mnk
    kind = type_code(x.dtype)
    plan = gemm_plan.frozen(card_of(device), kind, type_code(dtype), w.variant, "nt" if trans_b else "nn", mnk)
    # linear.hip rounds decoded values to x's type; the others would use them as they are.
    rounds = w.value_dtype != "float32" and (plan.source != "linear" or w.value_dtype != x.dtype.name)
    if w.shape[1] % w.unit or k % 8 or not multiple(16, x) or n * k >= 1 << 32 or rounds:
        # A row would start inside of what is decoded at once, or one of x inside of a vector.
        decoded = dequantize(device, w, np.dtype(np.float32))
        return dense_product(device, x, decoded, None, dtype, epilogue, trans_b=trans_b)
    _check_aligned(w)
    out = device.empty((m, n), dtype)
    operands = [x, *w.arrays().values(), *w.parameters(), *([kind] if plan.kinds else [])]
    launch_product(device, plan, operands, [], out, mnk, 1, trans_b, epilogue)
    return out


def _check_aligned(w: FrozenWeight) -> None:
    """Kernels read words of 32 bits.

    Raises:
        DeviceError: an array does not start at one.
    """
    for name, array in w.arrays().items():
        if array is not None and array.address % 4:
            raise DeviceError(
                f"linear_quantized: weight.{name} must start at a multiple of 4 bytes, got address {array.address:#x};"
                " copy the view into an array of its own"
            )
