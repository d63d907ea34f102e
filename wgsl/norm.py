"""RMSNorm, forward and backward, of long rows and short ones (QK-norm). Shaders: rms_norm*.wgsl."""

from __future__ import annotations

import numpy as np

from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP, compute_type, next_power_of_two, row_parts, vector_width, wgsl_type
from wgrad.wgsl.operators import implements
from wgrad.wgsl.reduce import sum_rows
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime

# Elements of a row that an invocation keeps in registers. The backward keeps two arrays, three with dweight's sums.
_MOST_FORWARD = 16
_MOST_BACKWARD = 8
# Workgroups of a backward with dweight: enough to hide latency, and each leaves a row of sums per row taken at once.
_MOST_GROUPS = {1: 1024, 2: 512}  # by rows in flight (AT_ONCE)
_FEWEST_ROWS = 4  # that such a workgroup takes in a row, so that its sums are little beside what it reads


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
        "C_T": compute_type(vec),
        "X_T": wgsl_type(x.dtype, vec),
        "Y_T": wgsl_type(y.dtype, vec),
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
        "C_T": compute_type(vec),
        "DY_T": wgsl_type(dy.dtype, vec),
        "X_T": wgsl_type(x.dtype, vec),
        "R_T": wgsl_type((dx if residual_grad is None else residual_grad).dtype, vec),
        "DX_T": wgsl_type(dx.dtype, vec),
    }
    at_once = GROUP // lanes
    for first, rows, (g, part, saved, extra, out) in row_parts(device, [dy, x, rstd, residual_grad, dx]):
        groups = device.groups(rows, at_once)
        sums = None
        if need_dweight:
            count = max(1, min(_MOST_GROUPS[int(constants["AT_ONCE"])], -(-rows // (at_once * _FEWEST_ROWS))))
            groups = (count, 1, 1)
            sums = device.empty((count * at_once, columns))
        params = [rows, columns // vec, 1.0 / columns]
        arrays = [g, part, weight, saved, extra, out, sums]
        work = float(rows * columns * 16)
        device.launch("norm_rms_backward", arrays, params, groups, constants, work=work)
        if sums is not None and dweight is not None:
            sum_rows(device, sums, dweight, first > 0)
    return dx, dweight
