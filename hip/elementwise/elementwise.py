"""add, mul, scale, bias, mask, soft-cap, cast; sums, deterministic. Kernels: elementwise.hip, reduce.hip."""

from __future__ import annotations

import numpy as np

from wgrad.device.memory import Array
from wgrad.hip.elements import GROUP, PER, eights, implements, type_code, type_codes
from wgrad.hip.runtime.launch import Long
from wgrad.hip.runtime.runtime import Runtime

_ADD, _MUL, _SCALE, _SCALE_BY, _BIAS, _MASK, _CAST = range(7)
ROWS_PER_PART = 64
MOST_PARTS = 512  # work-groups of the first pass of a sum


@implements("add")
def add(device: Runtime, a: Array, b: Array, out: Array | None) -> Array:
    return _elementwise(device, _ADD, a, b, device.empty(a.shape, a.dtype) if out is None else out)


@implements("mul")
def mul(device: Runtime, a: Array, b: Array) -> Array:
    return _elementwise(device, _MUL, a, b, device.empty(a.shape, a.dtype))


@implements("scale")
def scale(device: Runtime, x: Array, alpha: float) -> Array:
    return _elementwise(device, _SCALE, x, None, device.empty(x.shape, x.dtype), alpha=alpha)


@implements("scale_by")
def scale_by(device: Runtime, x: Array, factor: Array) -> Array:
    return _elementwise(device, _SCALE_BY, x, factor, device.empty(x.shape, x.dtype))


@implements("bias")
def bias(device: Runtime, x: Array, b: Array) -> Array:
    return _elementwise(device, _BIAS, x, b, device.empty(x.shape, x.dtype), columns=b.size)


@implements("mask")
def mask(device: Runtime, x: Array, keep: Array, value: float) -> Array:
    return _elementwise(device, _MASK, x, keep, device.empty(x.shape, x.dtype), alpha=value)


@implements("softcap")
def softcap(device: Runtime, x: Array, cap: float) -> Array:
    y = device.empty(x.shape, x.dtype)
    arguments = [x, y, Long(x.size), type_codes(x, y), float(cap)]
    device.launch("elementwise", "softcap", arguments, eights(x.size), work=x.nbytes + y.nbytes)
    return y


@implements("cast")
def cast(device: Runtime, x: Array, dtype: np.dtype) -> Array:
    return round_to(device, x, device.empty(x.shape, dtype))


def round_to(device: Runtime, x: Array, out: Array) -> Array:
    """Store x in out, converted to its dtype."""
    return _elementwise(device, _CAST, x, None, out)


def _elementwise(
    device: Runtime, op: int, a: Array, b: Array | None, y: Array, *, alpha: float = 0.0, columns: int = 1
) -> Array:
    second = 0 if b is None or b.dtype == np.uint32 else type_code(b.dtype)
    types = type_code(a.dtype) | second << 4 | type_code(y.dtype) << 8
    arguments = [a, b, y, Long(a.size), op, types, columns, float(alpha)]
    work = a.nbytes + y.nbytes + (0 if b is None else b.nbytes)
    device.launch("elementwise", "elementwise", arguments, eights(a.size), work=work)
    return y


# ---- sums --------------------------------------------------------------------------------
@implements("sum_rows")
def sum_rows(device: Runtime, x: Array, out: Array | None, accumulate: bool) -> Array:
    """Sum in parts of ROWS_PER_PART rows, then the parts, until one is left."""
    rows, columns = x.shape
    out = device.empty((columns,)) if out is None else out
    while rows > ROWS_PER_PART:
        parts = -(-rows // ROWS_PER_PART)
        part = device.empty((parts, columns))
        _launch_sum_rows(device, x, part, rows, ROWS_PER_PART, False)
        x, rows = part, parts
    _launch_sum_rows(device, x, out, rows, rows, accumulate)
    return out


def _launch_sum_rows(device: Runtime, x: Array, out: Array, rows: int, rows_per: int, accumulate: bool) -> None:
    columns = x.shape[1]
    grid = (-(-columns // GROUP), -(-rows // rows_per), 1)
    arguments = [x, out, rows, columns, rows_per, int(accumulate), type_codes(x, out)]
    device.launch("reduce", "sum_rows", arguments, grid, work=x.nbytes)


@implements("sum")
def sum_all(device: Runtime, x: Array) -> Array:
    parts = min(MOST_PARTS, -(-x.size // (GROUP * PER)))
    out = device.empty((1,))
    part = out if parts == 1 else device.empty((parts,))
    device.launch("reduce", "sum", [x, part, Long(x.size), type_codes(x)], (parts, 1, 1), work=x.nbytes)
    if part is not out:
        device.launch("reduce", "sum", [part, out, Long(parts), 0], (1, 1, 1), work=part.nbytes)
    return out
