"""Frozen weights whose dequantized values are kept, where every GEMM would dequantize them again.

An output layer that is not quantized is kept too, rounded to float16 and in blocks: the loss multiplies with it a chunk
of tokens at a time, and each GEMM would round it again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.memory import Array, size_class
from wgrad.wgsl.formats.formats import BLOCK, WeightForm
from wgrad.wgsl.gemm.dequantized import LEAST_ROWS, Form, dequantized, in_blocks
from wgrad.wgsl.gemm.plan import Gemm, Limits, on_tensor_cores, plan_on
from wgrad.wgsl.moe.grouped import dequantized_first
from wgrad.wgsl.runtime.runtime import Runtime


def nbytes(device: Runtime, weight: FrozenWeight | Array, rows: int, dtype: np.dtype, experts: int) -> int:
    """Bytes of the blocks that the values take; arguments as in `Device.dequantized_bytes`."""
    if isinstance(weight, Array):
        return size_class(weight.size * 2) if _worth_blocks(device, weight, rows, dtype) else 0
    size = weight.shape[0] * weight.shape[1]
    return sum(size_class(size * form[0].itemsize) for form in _forms(device, weight, rows, dtype, experts))


def keep(device: Runtime, weight: FrozenWeight | Array, rows: int, dtype: np.dtype, experts: int) -> None:
    """Dequantize a weight and keep its values; arguments as in `Device.keep_dequantized`."""
    if isinstance(weight, Array):
        if _worth_blocks(device, weight, rows, dtype):
            device.dequantized.keep_dense(weight, in_blocks(device, weight))
        return
    for form in _forms(device, weight, rows, dtype, experts):
        device.dequantized.keep(weight, form, dequantized(device, weight, form))


def _worth_blocks(device: Runtime, weight: Array, rows: int, dtype: np.dtype) -> bool:
    """Return whether an output layer is multiplied on tensor cores, with so many rows, and fits a binding in blocks."""
    limits, (v, c) = Limits.of(device), weight.shape
    whole = v % BLOCK == 0 and c % BLOCK == 0 and 2 * weight.size <= device.max_binding_bytes
    if weight.dtype_name != "bfloat16" or dtype != np.float16 or not whole:
        return False
    forward = Gemm((rows, v, c), "float16", "bfloat16", "float32", trans_b=True)
    return rows > LEAST_ROWS and on_tensor_cores(forward, limits)


def _forms(device: Runtime, weight: FrozenWeight, rows: int, dtype: np.dtype, experts: int) -> list[Form]:
    """The forms into which forward and backward dequantize a weight, each once."""
    limits, found = Limits.of(device), list[Form]()
    for gemm in _gemms(weight, rows, dtype.name, experts):
        if experts:
            form = dequantized_first(gemm, experts, limits)
            found += [] if form is None else [form]
        elif name := (chosen := plan_on(device, gemm)).dequantized:
            found.append((np.dtype(name), chosen.gemm.in_blocks))
    return list(dict.fromkeys(found))


def _gemms(weight: FrozenWeight, rows: int, dtype: str, experts: int) -> Iterator[Gemm]:
    """The GEMMs of forward (also into the float32 residual stream) and backward; of experts, of all together."""
    n, k = weight.shape[0] // (experts or 1), weight.shape[1]
    form = WeightForm.of(weight)
    yield Gemm((rows, n, k), dtype, form, dtype, trans_b=True)
    yield Gemm((rows, n, k), dtype, form, "float32", trans_b=True)
    yield Gemm((rows, k, n), dtype, form, dtype)
