"""Frozen weights whose dequantized values are kept, where every GEMM would dequantize them again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.memory import size_class
from wgrad.wgsl.formats.formats import WeightForm
from wgrad.wgsl.gemm.dequantized import Form, dequantized
from wgrad.wgsl.gemm.plan import Gemm, Limits, plan_on
from wgrad.wgsl.moe.grouped import dequantized_first
from wgrad.wgsl.runtime.runtime import Runtime


def nbytes(device: Runtime, weight: FrozenWeight, rows: int, dtype: np.dtype, experts: int) -> int:
    """Bytes of the blocks that the values take; arguments as in `Device.dequantized_bytes`."""
    size = weight.shape[0] * weight.shape[1]
    return sum(size_class(size * form[0].itemsize) for form in _forms(device, weight, rows, dtype, experts))


def keep(device: Runtime, weight: FrozenWeight, rows: int, dtype: np.dtype, experts: int) -> None:
    """Dequantize a weight and keep its values; arguments as in `Device.keep_dequantized`."""
    for form in _forms(device, weight, rows, dtype, experts):
        device.dequantized.keep(weight, form, dequantized(device, weight, form))


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
