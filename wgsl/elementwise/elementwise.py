"""Element-wise operators: copy, add, mul, scale, cast, bias, mask. Shaders: elementwise*.wgsl."""

from __future__ import annotations

import numpy as np

from wgrad.device.memory import Array
from wgrad.wgsl.elements import (
    compute_type,
    element_types,
    flat_parts,
    row_parts,
    same_block,
    same_place,
    vector_width,
    wgsl_type,
)
from wgrad.wgsl.formats.formats import KINDS
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime

_PER_GROUP = 1024  # elements of a workgroup: 256 invocations, 4 each


def copy(device: Runtime, src: Array, out: Array) -> None:
    """out = src; same size and dtype, any dtype."""
    if same_place(src, out):
        return
    if same_block(src, out):  # cannot be bound for reading and writing at once
        middle = device.empty(src.shape, src.dtype)
        copy(device, src, middle)
        src = middle
    for _, (a, b) in flat_parts(device, [src, out]):
        words, tail = -(-a.nbytes // 4), a.nbytes % 4
        vec = vector_width(words) if tail == 0 else 1
        params = [words // vec, (1 << 8 * tail) - 1]
        constants: dict[str, Constant] = {"W_T": "vec4<u32>" if vec == 4 else "u32"}
        groups = device.groups(words // vec, _PER_GROUP)
        device.launch("elementwise_copy", [a, b], params, groups, constants, work=2.0 * a.nbytes)


def _elementwise(
    device: Runtime,
    entry: str,
    a: Array | None,
    b: Array | None,
    y: Array,
    alpha: float = 0.0,
    *,
    whole_b: bool = False,
) -> Array:
    """One entry point of elementwise.wgsl; `whole_b`: b is not of y's size and is bound whole."""
    given = [x for x in (a, None if whole_b else b, y) if x is not None]
    vec = vector_width(y.size)
    for _, parts in flat_parts(device, given):
        pieces = iter(parts)
        part_a = next(pieces) if a is not None else None
        part_b = b if whole_b or b is None else next(pieces)
        out = next(pieces)
        b_type = wgsl_type(b.dtype, 1 if whole_b else vec) if b is not None else compute_type(vec)
        constants = element_types(vec, A_T=y if a is None else a, Y_T=y) | {"B_T": b_type}
        n = out.size // vec
        work = float(sum(part.nbytes for part in parts))
        params = [n, 1, float(alpha)]
        groups = device.groups(n, _PER_GROUP)
        device.launch("elementwise", [part_a, part_b, out], params, groups, constants, entry=entry, work=work)
    return y


@implements("add")
def add(device: Runtime, a: Array, b: Array, out: Array | None) -> Array:
    if out is None:
        return _elementwise(device, "add", a, b, device.empty(a.shape, a.dtype))
    for mine, other in ((a, b), (b, a)):
        if same_place(mine, out) and not same_block(other, out):
            return _elementwise(device, "add_to", None, other, out)
    if same_block(a, out) or same_block(b, out):
        copy(device, _elementwise(device, "add", a, b, device.empty(out.shape, out.dtype)), out)
        return out
    return _elementwise(device, "add", a, b, out)


@implements("mul")
def mul(device: Runtime, a: Array, b: Array) -> Array:
    return _elementwise(device, "mul", a, b, device.empty(a.shape, a.dtype))


@implements("scale")
def scale(device: Runtime, x: Array, alpha: float) -> Array:
    return _elementwise(device, "scale", x, None, device.empty(x.shape, x.dtype), alpha)


@implements("scale_by")
def scale_by(device: Runtime, x: Array, factor: Array) -> Array:
    return _elementwise(device, "scale_by", x, factor, device.empty(x.shape, x.dtype), whole_b=True)


@implements("mask")
def mask(device: Runtime, x: Array, keep: Array, value: float) -> Array:
    return _elementwise(device, "mask", x, keep, device.empty(x.shape, x.dtype), value)


@implements("softcap")
def softcap(device: Runtime, x: Array, cap: float) -> Array:
    return _elementwise(device, "softcap", x, None, device.empty(x.shape, x.dtype), cap)


@implements("cast")
def cast(device: Runtime, x: Array, dtype: np.dtype) -> Array:
    y = device.empty(x.shape, dtype)
    if x.dtype.name == "bfloat16" or (x.dtype == np.float16 and not device.float16):
        return _widen(device, x, y)
    return _elementwise(device, "convert", x, None, y)


def _widen(device: Runtime, x: Array, y: Array) -> Array:
    vec = vector_width(x.size)
    constants: dict[str, Constant] = {"VEC4": vec == 4, "KIND": KINDS[x.dtype.name], "Y_T": wgsl_type(y.dtype, vec)}
    for _, (a, b) in flat_parts(device, [x, y]):
        n = a.size // vec
        work = float(a.nbytes + b.nbytes)
        device.launch("elementwise_widen", [a, b], [n], device.groups(n, _PER_GROUP), constants, work=work)
    return y


@implements("bias")
def bias(device: Runtime, x: Array, b: Array) -> Array:
    y = device.empty(x.shape, x.dtype)
    vec = vector_width(b.size)
    constants = element_types(vec, A_T=x, B_T=b, Y_T=y)
    rows = (x.size // b.size, b.size)
    for _, count, (part, out) in row_parts(device, [device.view(x, rows), device.view(y, rows)]):
        n = count * b.size // vec
        params = [n, b.size // vec, 0.0]
        groups = device.groups(n, _PER_GROUP)
        device.launch("elementwise", [part, b, out], params, groups, constants, entry="bias", work=2.0 * y.nbytes)
    return y
