"""RMSNorm. Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019)."""

from __future__ import annotations

from typing import Any

from wgrad.autograd import schema
from wgrad.autograd.function import Context, Function
from wgrad.autograd.ops.elementwise import as_rows, with_shape
from wgrad.device.contract import Array


def _forward(ctx: Context, op: str, x: Array, weight: Array, eps: float, dtype: Any) -> Array:
    dtype = schema.rms_norm(ctx.device, x, weight, eps, dtype, op)
    rows = as_rows(ctx, x)
    y, rstd = ctx.device.rms_norm(rows, weight, eps, dtype=dtype)
    ctx.save(rows, weight, rstd)
    ctx.shape = tuple(x.shape)
    return with_shape(ctx, y, x.shape)


def _backward(ctx: Context, dy: Array, dh: Array | None) -> tuple[Array, Array | None]:
    x, weight, rstd = ctx.saved
    dx, dweight = ctx.device.rms_norm_backward(
        as_rows(ctx, dy),
        x,
        weight,
        rstd,
        residual_grad=None if dh is None else as_rows(ctx, dh),
        need_dweight=ctx.needs_grad[1],
        dtype=x.dtype,
    )
    return with_shape(ctx, dx, ctx.shape), dweight


class RMSNorm(Function):
    """y = x * rstd * weight over the last axis, rstd = 1 / sqrt(mean(x^2) + eps). x [..., C], weight float32 [C]."""

    @staticmethod
    def forward(ctx: Context, x: Array, weight: Array, *, eps: float, dtype: Any) -> Array:
        return _forward(ctx, "rms_norm", x, weight, eps, dtype)

    @staticmethod
    def backward(ctx: Context, dy: Array) -> Any:
        return _backward(ctx, dy, None)


class RMSNormResidual(Function):
    """h -> norm(h), h. The second output is h itself (the same storage) on its way along the residual stream, so that
    its gradient is added inside the backward of the norm rather than by a launch of its own."""

    @staticmethod
    def forward(ctx: Context, h: Array, weight: Array, *, eps: float, dtype: Any) -> tuple[Array, Array]:
        return _forward(ctx, "rms_norm_residual", h, weight, eps, dtype), h

    @staticmethod
    def backward(ctx: Context, dy: Array | None, dh: Array | None) -> Any:
        if dy is None:
            return dh, None
        return _backward(ctx, dy, dh)
