"""Quantization to NF4, value for value as in bitsandbytes, decoding of every format, and rounding to GGUF types.

Shaders: quantize_*.wgsl, round_*.wgsl.
"""

from __future__ import annotations

import numpy as np

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.device.formats.nf4 import LEVELS, NESTED_BLOCK_SIZE, NF4Array, dynamic_map, thresholds
from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP, flat_parts, vector_width, wgsl_type
from wgrad.wgsl.elementwise.reduce import sum_all
from wgrad.wgsl.formats.formats import KINDS, weight_operand, widest_unit
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime

_DECODED_AT_ONCE = 32  # elements per invocation, into blocks


@implements("quantize")
def quantize(device: Runtime, w: Array, block_size: int, double: bool, format: str) -> NF4Array:
    n = w.size
    packed = device.empty((-(-n // 2),), np.uint8)
    absmax = device.empty((-(-n // block_size),))
    kind = KINDS[w.dtype.name]
    vec = n % 8 == 0
    wide = "vec4<f32>" if kind == 0 else "vec4<u32>"
    words = max(1, block_size // (8 * GROUP))
    constants: dict[str, Constant] = {"BLOCK": block_size, "WORDS": words, "KIND": kind, "VEC": vec, "X_T": wide}
    constants |= {f"THRESHOLD_{i}": float(t) for i, t in enumerate(thresholds(LEVELS))}
    # Pieces whose codes and absmax start at multiples of 256 bytes; only w can be larger than a binding.
    for first, (part,) in flat_parts(device, [w], multiple=64 * block_size):
        count, blocks = part.size, -(-part.size // block_size)
        codes = device.view(packed, (-(-count // 2),), first // 2)
        peaks = device.view(absmax, (blocks,), first // block_size)
        groups = device.groups(count, 8 * words * GROUP)
        device.launch("quantize_nf4", [part, codes, peaks], [count], groups, constants, work=1.6 * part.nbytes)
    made = NF4Array(packed, absmax, (int(w.shape[0]), int(w.shape[1])), block_size)
    return quantize_scales(device, made) if double else made


@implements("quantize_scales")
def quantize_scales(device: Runtime, w: NF4Array) -> NF4Array:
    absmax, blocks = w.absmax, w.absmax.size
    codes = device.empty((blocks,), np.uint8)
    nested_absmax = device.empty((-(-blocks // NESTED_BLOCK_SIZE),))
    offset = device.empty((1,))
    nested_code, limits = _nested_tables(device)
    arrays = [absmax, sum_all(device, absmax), limits, offset, codes, nested_absmax]
    device.launch("quantize_nf4_nested", arrays, [blocks], device.groups(blocks, NESTED_BLOCK_SIZE), work=5.0 * blocks)
    return NF4Array(w.packed, codes, w.shape, w.block_size, nested_absmax, nested_code, offset)


def _nested_tables(device: Runtime) -> tuple[Array, Array]:
    """The 8-bit map and its thresholds, shared by all weights of this device."""
    tables: tuple[Array, Array] | None = device.__dict__.get("_nf4_tables")
    if tables is None:
        tables = (device.upload(dynamic_map()), device.upload(thresholds(dynamic_map())))
        device.__dict__["_nf4_tables"] = tables
    return tables


@implements("dequantize")
def decode(device: Runtime, w: FrozenWeight, dtype: np.dtype) -> Array:
    y = device.empty(w.shape, dtype)
    vec = vector_width(y.size)
    operand = weight_operand(w, w.unit, table=True)
    constants: dict[str, Constant] = {
        **operand.constants,
        "VEC": vec,
        "Y_T": wgsl_type(y.dtype, vec),
        "IN_BLOCKS": False,
    }
    per = max(1, round(y.size / operand.codes.size))
    for first, (part,) in flat_parts(device, [y]):
        count = part.size // vec
        codes = device.view(operand.codes, (-(-part.size // per),), first // per)
        arrays = [None, codes, part, *[None] * 4, *operand.scales]
        params = [count, first, *operand.parameters, 0, *operand.stack, 0]
        groups = device.groups(count, 4 * GROUP)
        device.launch("quantize_decode", arrays, params, groups, constants, work=float(part.nbytes))
    return y


def decode_in_blocks(device: Runtime, w: FrozenWeight) -> Array:
    """Decode to float16 in the order in which gemm_matrix.wgsl reads fastest.

    Blocks of 16 x 16 follow each other row by row. In a block, the left halves of all rows precede the right halves.

    w: its sides are multiples of 16, and its values fit one binding.
    """
    y = device.empty(w.shape, np.dtype(np.float16))
    operand = weight_operand(w, widest_unit(w, _DECODED_AT_ONCE), table=True)
    constants: dict[str, Constant] = {**operand.constants, "Y_T": "vec4<u32>", "IN_BLOCKS": True}
    constants["EIGHTS"] = operand.unit // 8
    count = y.size // operand.unit
    arrays = [None, operand.codes, y, *[None] * 4, *operand.scales]
    params = [count, 0, *operand.parameters, 0, *operand.stack, w.shape[1]]
    groups = device.groups(count, 2 * GROUP)
    device.launch("quantize_decode", arrays, params, groups, constants, work=float(y.nbytes))
    return y


# Shader by format, the elements per workgroup, and the FLOP per element: Q4_K tries 21 scales, Q6_K 19.
_ROUNDING = {
    **dict.fromkeys(("q4_0", "q5_0", "q8_0"), ("round_blocks", 4096, 20)),
    "q4_k": ("round_q4_k", 2048, 500),
    "q6_k": ("round_q6_k", 1024, 250),
}
_BITS = {"q4_0": 4, "q5_0": 5, "q8_0": 8}
_ALIGNED = 1 << 15  # elements from which on every array of these formats starts at a multiple of 256 bytes


@implements("round_weight")
def round_weight(device: Runtime, w: Array, out: FrozenWeight) -> FrozenWeight:
    shader, per_group, flop = _ROUNDING[out.format]
    constants: dict[str, Constant] = {"BITS": _BITS[out.format]} if out.format in _BITS else {}
    for first, (part,) in flat_parts(device, [w], _ALIGNED, device.dispatch_work / flop):
        count = part.size
        places = []
        for array in out.arrays().values():
            assert array is not None
            places.append(device.view(array, (array.size * count // w.size,), array.size * first // w.size))
        groups = device.groups(count, per_group)
        device.launch(shader, [part, *places], [count, 0], groups, constants, work=float(flop * count))
    return out
