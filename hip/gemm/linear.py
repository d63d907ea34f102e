"""GEMMs with a frozen weight (device/formats), decoded inside the GEMM. plan.py chooses the kernel."""

from __future__ import annotations

import numpy as np

from wgrad.device.errors import DeviceError
from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.formats.nf4 import NF4Array
from wgrad.device.memory import Array
from wgrad.hip.elements import implements, type_code
from wgrad.hip.formats.quantize import dequantize
from wgrad.hip.gemm import plan as gemm_plan
from wgrad.hip.gemm.gemm import Epilogue, LowRank, dense_product, gpu_of, launch_product, multiple
from wgrad.hip.runtime.columns import apart, take, together
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
    if weight.parts:
        return _stack(device, x, weight, bias, residual, lowrank, dtype)
    epilogue = Epilogue(1.0, bias, residual, lowrank)
    return _product(device, x, weight, (x.shape[0], weight.shape[0], x.shape[1]), True, dtype, epilogue)


@implements("linear_quantized_backward")
def linear_quantized_backward(
    device: Runtime, dy: Array, weight: FrozenWeight, lowrank: LowRank | None, dtype: np.dtype
) -> Array:
    if weight.parts:
        return _stack_backward(device, dy, weight, lowrank, dtype)
    mnk = (dy.shape[0], weight.shape[1], dy.shape[1])
    return _product(device, dy, weight, mnk, False, dtype, Epilogue(lowrank=lowrank))


def _stack(
    device: Runtime,
    x: Array,
    weight: FrozenWeight,
    bias: Array | None,
    residual: Array | None,
    lowrank: LowRank | None,
    dtype: np.dtype,
) -> Array:
    """Multiply with each weight of a stack on its own."""
    assert isinstance(weight, NF4Array)
    found, row, (u, v) = [], 0, lowrank or (None, None)
    rank = 0 if v is None else v.shape[1]
    for number, part in enumerate(weight.split(device.view)):
        rows = part.shape[0]
        own_bias = None if bias is None else device.view(bias, (rows,), row)
        own_residual = None if residual is None else take(device, residual, row, rows)
        term = None
        if u is not None and v is not None:
            term = (take(device, u, number * rank, rank), device.view(v, (rows, rank), row * rank))
        epilogue = Epilogue(1.0, own_bias, own_residual, term)
        found.append(_product(device, x, part, (x.shape[0], rows, x.shape[1]), True, dtype, epilogue))
        row += rows
    return together(device, found)


def _stack_backward(
    device: Runtime, dy: Array, weight: FrozenWeight, lowrank: LowRank | None, dtype: np.dtype
) -> Array:
    """Return the sum of the gradients through each weight of a stack, in float32 until the last."""
    assert isinstance(weight, NF4Array)
    dx = None
    parts = list(zip(weight.split(device.view), apart(device, dy, weight.parts)))
    for number, (part, grad) in enumerate(parts):
        last = number == len(parts) - 1
        epilogue = Epilogue(residual=dx, lowrank=lowrank if last else None)
        mnk = (dy.shape[0], weight.shape[1], grad.shape[1])
        dx = _product(device, grad, part, mnk, False, dtype if last else np.dtype(np.float32), epilogue)
    assert dx is not None
    return dx


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
    # GEMMs of more than one row have kernels for some formats only (formats/weight_formats.hpp).
    restored = w.variant not in gemm_plan.DECODED_IN_PRODUCTS and not (m == 1 and trans_b)
    plan = gemm_plan.frozen(gpu_of(device), kind, type_code(dtype), w.variant, "nt" if trans_b else "nn", mnk)
    # linear.hip rounds decoded values to x's dtype; the other kernels use them unrounded.
    rounds = w.value_dtype != "float32" and (plan.source != "linear" or w.value_dtype != x.dtype.name)
    if w.shape[1] % w.unit or k % 8 or not multiple(16, x) or n * k >= 1 << 32 or rounds or restored:
        # Otherwise a row would start within a decoded unit, or one of x within a vector.
        narrow = restored and plan.source == "linear"  # which would round it to x's dtype
        decoded = dequantize(device, w, x.dtype if narrow else np.dtype(np.float32))
        return dense_product(device, x, decoded, None, dtype, epilogue, trans_b=trans_b)
    check_aligned(w)
    out = device.empty((m, n), dtype)
    operands = [x, *w.arrays().values(), *w.parameters(), *([kind] if plan.kinds else [])]
    launch_product(device, plan, operands, [], out, mnk, 1, trans_b, epilogue)
    return out


def check_aligned(w: FrozenWeight) -> None:
    """Check that a weight's arrays are aligned to 32 bits.

    Raises:
        DeviceError: An array is not.
    """
    for name, array in w.arrays().items():
        if array is not None and array.address % 4:
            raise DeviceError(
                f"linear_quantized: weight.{name} must start at a multiple of 4 bytes, got address {array.address:#x};"
                " copy the view into an array of its own"
            )
