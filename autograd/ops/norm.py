"""RMSNorm and LayerNorm.

Sources: Zhang and Sennrich, Root Mean Square Layer Normalization (2019); Ba, Kiros and Hinton, Layer Normalization
(2016).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.function import Context, Weight, differentiable
from wgrad.autograd.gradients import GradientWithCopy, Recomputed
from wgrad.autograd.operators import operator
from wgrad.autograd.precision import compute_dtype, finish, up
from wgrad.autograd.rows import as_rows, with_shape
from wgrad.autograd.tensor import Tensor, is_recomputing
from wgrad.device.contract import Array, DType


@differentiable
def rms_norm(ctx: Context, x: Tensor, weight: Weight, eps: float = 1e-6, *, dtype: DType = None) -> Tensor:
    """x [..., C], weight float32 [C] -> x / sqrt(mean(x^2) + eps) * weight, over the last axis."""
    out: Tensor = _normed(ctx, x, weight, eps, dtype)
    return out


@rms_norm.backward
def _(ctx: Context, dy: Array) -> Any:
    return _norm_grads(ctx, dy, None)


@differentiable
def rms_norm_residual(
    ctx: Context, h: Tensor, weight: Weight, eps: float, *, dtype: DType = None, again: bool = False
) -> tuple[Tensor, Tensor]:
    """-> norm(h), h. The second output is h itself (the same memory). Use it for the residual: its gradient is then
    added inside the norm's backward instead of by a launch of its own.

    again: the backward recomputes norm(h), so that the operators that read it need not save it."""
    y = _normed(ctx, h, weight, eps, dtype)
    if again and not is_recomputing():
        ctx.recomputed, ctx.eps, ctx.y_dtype = Recomputed(), eps, y.dtype
    return y, h


@rms_norm_residual.backward
def _(ctx: Context, dy: Array | None, dh: Array | None) -> Any:
    if ctx.recomputed:
        x, weight, _ = ctx.saved
        y, _ = ctx.device.rms_norm(x, weight, ctx.eps, dtype=ctx.y_dtype)
        ctx.recomputed.give(y)
        del y
    return (dh, None) if dy is None else _norm_grads(ctx, dy, dh)


def _normed(ctx: Context, x: Array, weight: Array, eps: float, dtype: DType) -> Array:
    rows = as_rows(ctx, x)
    rms_norm.rules.check(ctx.device, (rows, weight, eps), {"dtype": dtype}, ctx.name)
    y, rstd = ctx.device.rms_norm(rows, weight, eps, dtype=dtype)
    ctx.save(rows, weight, rstd)
    ctx.shape = tuple(x.shape)
    return with_shape(ctx, y, x.shape)


def _norm_grads(ctx: Context, dy: Array, dh: Array | None) -> tuple[Array | GradientWithCopy, Array | None]:
    residual_grad, dtype = None if dh is None else as_rows(ctx, dh), ctx.rounded_by(0)
    rounded = None if dtype is None else ctx.device.empty(ctx.saved[0].shape, dtype)
    options = {"residual_grad": residual_grad, "need_dweight": ctx.needs_grad[1], "rounded": rounded}
    dx, dweight = ctx.device.rms_norm_backward(as_rows(ctx, dy), *ctx.saved, **options)
    dx = with_shape(ctx, dx, ctx.shape)
    return dx if rounded is None else GradientWithCopy(dx, with_shape(ctx, rounded, ctx.shape)), dweight


@rms_norm.operator
def _(args: Args, x: Array, weight: Array, eps: float, *, dtype: DType = None) -> dict[str, Any]:
    """x [R, C], weight [C] float32 -> y [R, C] (default dtype: x's), rstd [R] float32.

    y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps).
    """
    args.array("x", x, "R C").array("weight", weight, "C", "f32")
    args.rule(eps > 0, f"eps must be positive, got {eps}; rms_norm_eps of config.json is usually 1e-5")
    return {"dtype": args.dtype("dtype", dtype, x.dtype)}


@rms_norm.reference
def _(x: np.ndarray, weight: np.ndarray, eps: float, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    compute = compute_dtype(x, weight)
    wide = up(x, compute)
    rstd = 1 / np.sqrt(np.mean(wide * wide, axis=1) + compute.type(eps))
    y = wide * rstd[:, None] * up(weight, compute)
    return finish(y, dtype, compute), rstd


@operator
def rms_norm_backward(
    args: Args,
    dy: Array,
    x: Array,
    weight: Array,
    rstd: Array,
    *,
    residual_grad: Array | None = None,
    need_dweight: bool = True,
    rounded: Array | None = None,
    dtype: DType = None,
) -> dict[str, Any]:
    """-> dx [R, C] (+ residual_grad when given; default dtype: x's), dweight [C] float32 or None. rounded [R, C], when
    given, is overwritten with dx, in its own dtype."""
    args.array("dy", dy, "R C").array("x", x, "R C").array("weight", weight, "C", "f32").array("rstd", rstd, "R", "f32")
    if residual_grad is not None:
        args.array("residual_grad", residual_grad, "R C")
    if rounded is not None:
        args.array("rounded", rounded, "R C")
    return {"dtype": args.dtype("dtype", dtype, x.dtype)}


@rms_norm_backward.reference
def _(
    dy: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    rstd: np.ndarray,
    residual_grad: np.ndarray | None,
    need_dweight: bool,
    rounded: np.ndarray | None,
    dtype: Any,
) -> tuple[np.ndarray, np.ndarray | None]:
    compute = compute_dtype(dy, x, weight, rstd, residual_grad)
    grad, normed = up(dy, compute), up(x, compute) * up(rstd, compute)[:, None]
    weighted = grad * up(weight, compute)
    dx = (weighted - normed * np.mean(weighted * normed, axis=1, keepdims=True)) * up(rstd, compute)[:, None]
    if residual_grad is not None:
        dx += up(residual_grad, compute)
    if rounded is not None:
        rounded[...] = dx
    dweight = np.sum(grad * normed, axis=0) if need_dweight else None
    return finish(dx, dtype, compute), dweight


@differentiable
def layer_norm(
    ctx: Context, x: Tensor, weight: Weight, bias: Weight, eps: float = 1e-5, *, dtype: DType = None
) -> Tensor:
    """x [..., C], weight and bias float32 [C] -> (x - mean) / sqrt(var + eps) * weight + bias, over the last axis."""
    y, mean, rstd = ctx.device.layer_norm(as_rows(ctx, x), weight, bias, eps, dtype=dtype)
    ctx.save(as_rows(ctx, x), weight, mean, rstd)
    ctx.shape = tuple(x.shape)
    out: Tensor = with_shape(ctx, y, x.shape)
    return out


@layer_norm.backward
def _(ctx: Context, dy: Array) -> Any:
    needs = {"need_dweight": ctx.needs_grad[1], "need_dbias": ctx.needs_grad[2]}
    dx, dweight, dbias = ctx.device.layer_norm_backward(as_rows(ctx, dy), *ctx.saved, **needs)
    return with_shape(ctx, dx, ctx.shape), dweight, dbias


@layer_norm.operator
def _(args: Args, x: Array, weight: Array, bias: Array, eps: float, *, dtype: DType = None) -> dict[str, Any]:
    """x [R, C], weight and bias [C] float32 -> y [R, C] (default dtype: x's), mean [R] and rstd [R] float32.

    y = (x - mean) * rstd * weight + bias, rstd = 1 / sqrt(mean((x - mean)^2) + eps).
    """
    args.array("x", x, "R C").array("weight", weight, "C", "f32").array("bias", bias, "C", "f32")
    args.rule(eps > 0, f"eps must be positive, got {eps}; 1e-5 is usual")
    return {"dtype": args.dtype("dtype", dtype, x.dtype)}


@layer_norm.reference
def _(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float, dtype: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    compute = compute_dtype(x, weight, bias)
    wide = up(x, compute)
    mean = np.mean(wide, axis=1)
    centered = wide - mean[:, None]
    rest = np.mean(centered, axis=1)  # the rounding error of a mean that is large compared with the row's deviation
    centered -= rest[:, None]
    rstd = 1 / np.sqrt(np.mean(centered * centered, axis=1) + compute.type(eps))
    y = centered * rstd[:, None] * up(weight, compute) + up(bias, compute)
    return finish(y, dtype, compute), mean + rest, rstd


@operator
def layer_norm_backward(
    args: Args,
    dy: Array,
    x: Array,
    weight: Array,
    mean: Array,
    rstd: Array,
    *,
    need_dweight: bool = True,
    need_dbias: bool = True,
    dtype: DType = None,
) -> dict[str, Any]:
    """-> dx [R, C] (default dtype: x's), dweight [C] float32 or None, dbias [C] float32 or None."""
    args.array("dy", dy, "R C").array("x", x, "R C").array("weight", weight, "C", "f32")
    args.array("mean", mean, "R", "f32").array("rstd", rstd, "R", "f32")
    return {"dtype": args.dtype("dtype", dtype, x.dtype)}


@layer_norm_backward.reference
def _(
    dy: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    mean: np.ndarray,
    rstd: np.ndarray,
    need_dweight: bool,
    need_dbias: bool,
    dtype: Any,
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    compute = compute_dtype(dy, x, weight, mean, rstd)
    scale = up(rstd, compute)[:, None]
    grad, normed = up(dy, compute), (up(x, compute) - up(mean, compute)[:, None]) * scale
    weighted = grad * up(weight, compute)
    along = np.mean(weighted * normed, axis=1, keepdims=True)
    dx = (weighted - np.mean(weighted, axis=1, keepdims=True) - normed * along) * scale
    dweight = np.sum(grad * normed, axis=0) if need_dweight else None
    return finish(dx, dtype, compute), dweight, np.sum(grad, axis=0) if need_dbias else None
