"""RMSNorm and LayerNorm, forward and backward, for long rows and short ones (QK-norm). Shaders: norm_*.wgsl."""

from __future__ import annotations

import numpy as np

from wgrad.device.memory import Array
from wgrad.wgsl.elements import (
    GROUP,
    element_types,
    next_power_of_two,
    row_parts,
    vector_width,
)
from wgrad.wgsl.elementwise.reduce import plan_chunks, sum_rows
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime

# Elements of a row that an invocation keeps in registers. The backward keeps two arrays, three with dweight's sums.
_MOST_FORWARD = 16
_MOST_BACKWARD = 8
# Workgroups of a backward with dweight: enough to hide latency; each writes a row of sums per row in flight.
_MOST_GROUPS = {1: 1024, 2: 512}  # by rows in flight (AT_ONCE)
_FEWEST_ROWS = 4  # in sequence per such workgroup, so that its sums are small next to what it reads


def lanes_of_row(columns: int) -> int:
    """Invocations that share a row: about four elements each, from 8 to 256."""
    return min(GROUP, max(8, next_power_of_two(-(-columns // 4))))


@implements("rms_norm")
def rms_norm(device: Runtime, x: Array, weight: Array, eps: float, dtype: np.dtype) -> tuple[Array, Array]:
    columns = x.shape[1]
    y = device.empty(x.shape, dtype)
    rstd = device.empty(x.shape[:1])
    vec = vector_width(columns)
    lanes = lanes_of_row(columns // vec)
    constants: dict[str, Constant] = {
        "VEC": vec,
        "LANES": lanes,
        "PER": min(_MOST_FORWARD, -(-columns // vec // lanes)),
        **element_types(vec, X_T=x, Y_T=y),
    }
    for _, rows, (part, out, saved) in row_parts(device, [x, y, rstd]):
        params = [rows, columns // vec, 1.0 / columns, float(eps)]
        groups = device.groups(rows * lanes, GROUP)
        work = float(rows * columns * 8)
        device.launch("norm_rms", [part, weight, out, saved], params, groups, constants, work=work)
    return y, rstd


@implements("rms_norm_backward")
def rms_norm_backward(
    device: Runtime,
    dy: Array,
    x: Array,
    weight: Array,
    rstd: Array,
    residual_grad: Array | None,
    need_dweight: bool,
    rounded: Array | None,
    dtype: np.dtype,
) -> tuple[Array, Array | None]:
    columns = x.shape[1]
    dx = device.empty(x.shape, dtype)
    dweight = device.empty((columns,)) if need_dweight else None
    vec = vector_width(columns)
    lanes = lanes_of_row(columns // vec)
    constants: dict[str, Constant] = {
        "VEC": vec,
        "LANES": lanes,
        "PER": min(_MOST_BACKWARD, -(-columns // vec // lanes)),
        "AT_ONCE": 2 if need_dweight and x.dtype.itemsize + dy.dtype.itemsize < 6 else 1,
        "RESIDUAL": residual_grad is not None,
        "DWEIGHT": need_dweight,
        "ROUNDED": rounded is not None,
        **element_types(vec, DY_T=dy, X_T=x, R_T=_or(residual_grad, dx), DX_T=dx, ROUNDED_T=_or(rounded, dx)),
    }
    at_once = GROUP // lanes
    for first, rows, (g, part, saved, extra, out, less) in row_parts(device, [dy, x, rstd, residual_grad, dx, rounded]):
        groups = device.groups(rows, at_once)
        sums = None
        if need_dweight:
            count = max(1, min(_MOST_GROUPS[int(constants["AT_ONCE"])], -(-rows // (at_once * _FEWEST_ROWS))))
            groups = (count, 1, 1)
            sums = device.empty((count * at_once, columns))
        params = [rows, columns // vec, 1.0 / columns]
        arrays = [g, part, weight, saved, extra, out, sums, less]
        work = float(rows * columns * 16)
        device.launch("norm_rms_backward", arrays, params, groups, constants, work=work)
        if sums is not None and dweight is not None:
            sum_rows(device, sums, dweight, first > 0)
    return dx, dweight


def _or(array: Array | None, other: Array) -> Array:
    """Return the array, or another for the type of an absent one."""
    return other if array is None else array


@implements("layer_norm")
def layer_norm(
    device: Runtime, x: Array, weight: Array, bias: Array, eps: float, dtype: np.dtype
) -> tuple[Array, Array, Array]:
    columns = x.shape[1]
    y, mean, rstd = device.empty(x.shape, dtype), device.empty(x.shape[:1]), device.empty(x.shape[:1])
    constants = _layer_constants(columns, _MOST_FORWARD) | {"FORWARD": True}
    vec, lanes = int(constants["VEC"]), int(constants["LANES"])
    constants |= element_types(vec, X_T=x, Y_T=y)
    for _, rows, (part, out, *saved) in row_parts(device, [x, y, mean, rstd]):
        params = [rows, columns // vec, 1.0 / columns, float(eps)]
        groups = device.groups(rows * lanes, GROUP)
        arrays = [part, weight, bias, out, *saved]
        work = float(rows * columns * 8)
        device.launch("norm_layer", arrays, params, groups, constants, entry="forward", work=work)
    return y, mean, rstd


@implements("layer_norm_backward")
def layer_norm_backward(
    device: Runtime,
    dy: Array,
    x: Array,
    weight: Array,
    mean: Array,
    rstd: Array,
    need_dweight: bool,
    need_dbias: bool,
    dtype: np.dtype,
) -> tuple[Array, Array | None, Array | None]:
    columns = x.shape[1]
    dx = device.empty(x.shape, dtype)
    dweight = device.empty((columns,)) if need_dweight else None
    constants = _layer_constants(columns, _MOST_BACKWARD) | {"FORWARD": False, "WIDE": plan_chunks(1, columns).wide}
    vec, lanes = int(constants["VEC"]), int(constants["LANES"])
    constants |= element_types(vec, DY_T=dy, X_T=x, DX_T=dx)
    for first, rows, views in row_parts(device, [dy, x, mean, rstd, dx]):
        plan = plan_chunks(rows, columns)
        sums = device.empty((plan.chunks, columns)) if need_dweight else None
        params = [rows, columns // vec, 1.0 / columns, plan.step]
        arrays, groups = [*views, weight, sums], device.groups(rows * lanes, GROUP)
        work = float(rows * columns * 12)
        device.launch("norm_layer", arrays, params, groups, constants, entry="backward", work=work)
        if sums is not None:
            groups = plan.groups(columns)
            device.launch("norm_layer", arrays, params, groups, constants, entry="dweight", work=work)
            sum_rows(device, sums, dweight, first > 0)
    return dx, dweight, sum_rows(device, dy, None, False) if need_dbias else None


def _layer_constants(columns: int, most: int) -> dict[str, Constant]:
    """How a row is divided, with at most `most` elements in an invocation's registers."""
    vec = vector_width(columns)
    lanes = lanes_of_row(columns // vec)
    per = min(most, -(-columns // vec // lanes))
    return {"VEC": vec, "LANES": lanes, "PER": per}
