"""DoRA: each row of a weight with its adapter is scaled to a trained length. Composed of other operators.

Source: Liu et al., DoRA: Weight-Decomposed Low-Rank Adaptation (2024).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.function import Context, Weight, differentiable
from wgrad.autograd.rows import as_rows, with_shape
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array, Device
from wgrad.device.formats.frozen_weight import FrozenWeight

EPS = 1e-24  # added to the mean square of a row, which is at least 1e-6 in trained weights


@differentiable
def dora_scale(ctx: Context, x: Tensor, magnitude: Weight, inverse: Array) -> Tensor:
    """x [..., N], a layer's output without its bias; magnitude float32 [N]; inverse float32 [N], one over the length of
    each row of the layer's weight (`inverse_row_norms`), a constant as in the paper's section 4.3 -> x * magnitude *
    inverse."""
    rows, device = as_rows(ctx, x), ctx.device
    factor = device.mul(magnitude, inverse)
    ctx.save(rows, factor, inverse)
    ctx.shape = tuple(x.shape)
    out: Tensor = with_shape(ctx, _times(device, rows, factor), x.shape)
    return out


@dora_scale.backward
def _(ctx: Context, dy: Array) -> Any:
    device, (rows, factor, inverse) = ctx.device, ctx.saved
    grad, dmagnitude = as_rows(ctx, dy), None
    dx = with_shape(ctx, _times(device, grad, factor), ctx.shape) if ctx.needs_grad[0] else None
    if ctx.needs_grad[1]:
        # In float32: the gradient of a scaled loss times a value may be beyond float16.
        wide = grad if grad.dtype == inverse.dtype else device.cast(grad, inverse.dtype)
        dmagnitude = device.mul(device.sum_rows(device.mul(wide, rows)), inverse)
    return dx, dmagnitude


def _times(device: Device, rows: Array, factor: Array) -> Array:
    """rows [R, N] * factor [N]."""
    ones = device.empty((rows.shape[0], 1), factor.dtype)
    device.fill(ones, 1.0)
    columns = device.gemm(ones, device.view(factor, (1, factor.shape[0])), dtype=rows.dtype)
    return device.mul(rows, columns)


def inverse_row_norms(device: Device, weight: Array | FrozenWeight, a: Array, b: Array, scaling: float) -> Array:
    """Return one over the length of each row of weight + scaling * b a, float32 [N].

    weight [N, K]; a [r, K] and b [N, r] float32. Takes two float32 arrays of the weight's size while it runs.
    """
    wide = device.dequantize(weight) if isinstance(weight, FrozenWeight) else device.cast(weight, np.float32)
    total = device.gemm(b, a, alpha=scaling)
    device.add(wide, total, out=total)
    ones = device.empty((total.shape[1],), np.float32)
    device.fill(ones, 1.0)
    _, rstd = device.rms_norm(total, ones, EPS)
    return device.scale(rstd, total.shape[1] ** -0.5)
