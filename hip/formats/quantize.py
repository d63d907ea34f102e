"""Quantize and dequantize weights. Kernels: quantize.hip; round_weight.hip for GGUF's formats."""

from __future__ import annotations

import numpy as np

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.formats.nf4 import NESTED_BLOCK_SIZE, NF4Array, dynamic_map, thresholds
from wgrad.device.memory import Array
from wgrad.hip.elements import GROUP, implements, type_code
from wgrad.hip.elementwise.elementwise import cast
from wgrad.hip.runtime.launch import Long
from wgrad.hip.runtime.runtime import Runtime

_RUN = 16  # elements per work-item


@implements("quantize")
def quantize(device: Runtime, w: Array, block_size: int, double: bool, format: str) -> NF4Array:
    n = w.size
    packed, absmax = device.empty((-(-n // 2),), np.uint8), device.empty((-(-n // block_size),))
    runs = max(1, block_size // (_RUN * GROUP))
    arguments = [w, packed, absmax, Long(n), block_size, type_code(w.dtype)]
    groups = device.groups(n, _RUN * runs * GROUP)
    device.launch("quantize", "nf4_quantize", arguments, groups, work=w.nbytes + packed.nbytes)
    plain = NF4Array(packed, absmax, (int(w.shape[0]), int(w.shape[1])), block_size)
    return quantize_scales(device, plain) if double else plain


@implements("quantize_scales")
def quantize_scales(device: Runtime, w: NF4Array) -> NF4Array:
    blocks = w.absmax.size
    codes, offset = device.empty((blocks,), np.uint8), device.empty((1,))
    nested_absmax = device.empty((-(-blocks // NESTED_BLOCK_SIZE),))
    nested_code, limits = device.once(_tables)
    device.launch("quantize", "nf4_mean", [w.absmax, offset, blocks], (1, 1, 1), work=w.absmax.nbytes)
    arguments = [w.absmax, offset, limits, codes, nested_absmax, blocks]
    groups = device.groups(blocks, NESTED_BLOCK_SIZE)
    device.launch("quantize", "nf4_nest", arguments, groups, work=w.absmax.nbytes)
    return NF4Array(w.packed, codes, w.shape, w.block_size, nested_absmax, nested_code, offset)


def _tables(device: Runtime) -> tuple[Array, Array]:
    """Return the 8-bit map and its thresholds, shared by all weights of a device."""
    return device.upload(dynamic_map()), device.upload(thresholds(dynamic_map()))


@implements("dequantize")
def dequantize(device: Runtime, w: FrozenWeight, dtype: np.dtype) -> Array:
    if w.value_dtype not in ("float32", dtype.name):  # storing rounds to the type of y
        return cast(device, dequantize(device, w, np.dtype(w.value_dtype)), dtype)
    y = device.empty(w.shape, dtype)
    if isinstance(w, NF4Array) and w.parts:
        for part, at in zip(w.split(device.view), w.places()):
            device.copy(dequantize(device, part, dtype), device.view(y, part.shape, at.element))
        return y
    arrays, size = list(w.arrays().values()), Long(y.size)
    if isinstance(w, NF4Array):  # a kernel of its own, for rows of any length, which takes sizes, no logarithms
        name, arguments = w.format, [*arrays, y, size, w.block_size, w.nested_block_size, type_code(dtype)]
    else:
        name, arguments = w.variant, [*arrays, *w.parameters(), y, size, type_code(dtype)]
    work = y.nbytes + w.nbytes
    device.launch("quantize", f"{name}_dequantize", arguments, device.groups(y.size, _RUN * GROUP), work=work)
    return y


# Elements per work-item of round_weight.hip.
_ROUNDED = {"q4_0": 4, "q5_0": 4, "q8_0": 4, "q4_k": 32, "q6_k": 16}


@implements("round_weight")
def round_weight(device: Runtime, w: Array, out: FrozenWeight) -> FrozenWeight:
    groups = device.groups(w.size, _ROUNDED[out.format] * GROUP)
    arguments = [w, *out.arrays().values(), Long(w.size)]
    device.launch("round_weight", f"round_{out.format}", arguments, groups, work=float(w.nbytes))
    return out
