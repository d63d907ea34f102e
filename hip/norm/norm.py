"""RMSNorm and LayerNorm, forward and backward. Kernels: norm.hip, norm_layer.hip."""

from __future__ import annotations

import numpy as np

from wgrad.device.memory import Array
from wgrad.hip.elements import GROUP, implements, type_codes
from wgrad.hip.elementwise.elementwise import ROWS_PER_PART, round_to, sum_rows
from wgrad.hip.runtime.runtime import Runtime

# Up to so many columns a row is processed by 16 lanes, by a wave; above, by a work-group.
_ROW16, _WAVE = 256, 1024


@implements("rms_norm")
def rms_norm(device: Runtime, x: Array, weight: Array, eps: float, dtype: np.dtype) -> tuple[Array, Array]:
    rows, columns = x.shape
    y, rstd = device.empty(x.shape, dtype), device.empty((rows,))
    arguments = [x, weight, y, rstd, rows, columns, float(eps), type_codes(x, y)]
    kernel, groups = _by_rows(device, "rms_norm", rows, columns)
    device.launch("norm", kernel, arguments, groups, work=x.nbytes + y.nbytes)
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
    rows, columns = x.shape
    dx = device.empty(x.shape, dtype)
    arrays = [dy, x, weight, rstd, residual_grad, dx]
    arguments = [*arrays, rows, columns, type_codes(dy, x, residual_grad, dx)]
    kernel, groups = _by_rows(device, "rms_norm_backward", rows, columns)
    device.launch("norm", kernel, arguments, groups, work=sum(a.nbytes for a in arrays if a is not None))
    if rounded is not None:
        round_to(device, dx, rounded)
    return dx, _dweight(device, "norm", "rms_norm_dweight", dy, x, rstd) if need_dweight else None


def _by_rows(device: Runtime, kernel: str, rows: int, columns: int) -> tuple[str, tuple[int, int, int]]:
    """Return the kernel for rows of this length, and its grid."""
    lanes, suffix = (16, "_row16") if columns <= _ROW16 else (device.wave, "_wave") if columns <= _WAVE else (GROUP, "")
    return kernel + suffix, device.groups(rows * lanes, GROUP)


@implements("layer_norm")
def layer_norm(
    device: Runtime, x: Array, weight: Array, bias: Array, eps: float, dtype: np.dtype
) -> tuple[Array, Array, Array]:
    rows, columns = x.shape
    y, mean, rstd = device.empty(x.shape, dtype), device.empty((rows,)), device.empty((rows,))
    arguments = [x, weight, bias, y, mean, rstd, rows, columns, float(eps), type_codes(x, y)]
    kernel, groups = _by_rows(device, "layer_norm", rows, columns)
    device.launch("norm_layer", kernel, arguments, groups, work=x.nbytes + y.nbytes)
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
    rows, columns = x.shape
    dx = device.empty(x.shape, dtype)
    arguments = [dy, x, weight, mean, rstd, dx, rows, columns, type_codes(dy, x, dx)]
    kernel, groups = _by_rows(device, "layer_norm_backward", rows, columns)
    device.launch("norm_layer", kernel, arguments, groups, work=dy.nbytes + x.nbytes + dx.nbytes)
    dweight = _dweight(device, "norm_layer", "layer_norm_dweight", dy, x, mean, rstd) if need_dweight else None
    return dx, dweight, sum_rows(device, dy, None, False) if need_dbias else None


def _dweight(device: Runtime, source: str, kernel: str, dy: Array, x: Array, *statistics: Array) -> Array:
    rows, columns = x.shape
    parts = -(-rows // ROWS_PER_PART)
    part = device.empty((parts, columns))
    arguments = [dy, x, *statistics, part, rows, columns, ROWS_PER_PART, type_codes(dy, x)]
    grid = (-(-columns // GROUP), parts, 1)
    device.launch(source, kernel, arguments, grid, work=dy.nbytes + x.nbytes)
    return device.view(part, (columns,)) if parts == 1 else sum_rows(device, part, None, False)
