"""Elementwise operators and sums: mask, add, mul, scale, softcap, cast, bias."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.function import Context, Weight, differentiable
from wgrad.autograd.operators import operator
from wgrad.autograd.precision import compute_dtype, finish, store, up
from wgrad.autograd.rows import as_rows, with_shape
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array, DType


@differentiable
def mask(ctx: Context, x: Tensor, keep: Array, value: float) -> Tensor:
    """x where keep (uint32, same shape) is non-zero, else value."""
    ctx.keep = keep
    out: Tensor = ctx.device.mask(x, keep, value)
    return out


@mask.backward
def _(ctx: Context, dy: Array) -> Any:
    return (ctx.device.mask(dy, ctx.keep, 0.0),)


@mask.operator
def _(args: Args, x: Array, keep: Array, value: float) -> None:
    """x where keep (uint32, same shape) is non-zero, else value."""
    args.any_shape("x", x)
    args.array("keep", keep, " ".join(str(n) for n in x.shape), "u32", "keep has a value for each element of x")


@mask.reference
def _(x: np.ndarray, keep: np.ndarray, value: float) -> np.ndarray:
    return np.where(keep != 0, x, x.dtype.type(value))


@differentiable
def add(ctx: Context, a: Tensor, b: Weight) -> Tensor:
    """a + b, same shape, in a's dtype."""
    y: Tensor = ctx.device.add(a, b)
    ctx.dtypes = a.dtype, b.dtype
    return y


@add.backward
def _(ctx: Context, dy: Array) -> Any:
    return tuple(
        None if not wanted else dy if dtype == dy.dtype else ctx.device.cast(dy, dtype)
        for wanted, dtype in zip(ctx.needs_grad, ctx.dtypes)
    )


@add.operator
def _(args: Args, a: Array, b: Array, *, out: Array | None = None) -> None:
    """a + b, same shape, in a's dtype; out may be a or b."""
    args.any_shape("a", a).same_shape("a", a, "b", b)
    if out is not None:
        args.same_shape("a", a, "out", out)


@add.reference
def _(a: np.ndarray, b: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    compute = compute_dtype(a, b)
    return store(up(a, compute) + up(b, compute), out, False, a.dtype, compute)


@differentiable
def mul(ctx: Context, a: Tensor, b: Weight) -> Tensor:
    """a * b, same shape, in a's dtype."""
    y: Tensor = ctx.device.mul(a, b)
    ctx.save(a if ctx.needs_grad[1] else None, b if ctx.needs_grad[0] else None)
    ctx.dtype = b.dtype
    return y


@mul.backward
def _(ctx: Context, dy: Array) -> Any:
    a, b = ctx.saved
    da = None if b is None else ctx.device.mul(dy, b)
    db = None if a is None else ctx.device.mul(dy, a)
    if db is not None and db.dtype != ctx.dtype:
        db = ctx.device.cast(db, ctx.dtype)
    return da, db


@mul.operator
def _(args: Args, a: Array, b: Array) -> None:
    """a * b, same shape, in a's dtype."""
    args.any_shape("a", a).same_shape("a", a, "b", b)


@mul.reference
def _(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    compute = compute_dtype(a, b)
    return finish(up(a, compute) * up(b, compute), a.dtype, compute)


@differentiable
def scale(ctx: Context, x: Tensor, alpha: float) -> Tensor:
    """alpha * x."""
    ctx.alpha = alpha
    out: Tensor = ctx.device.scale(x, alpha)
    return out


@scale.backward
def _(ctx: Context, dy: Array) -> Any:
    return (ctx.device.scale(dy, ctx.alpha),)


@scale.operator
def _(args: Args, x: Array, alpha: float) -> None:
    """alpha * x."""
    args.any_shape("x", x)
    args.rule(math.isfinite(alpha), f"alpha must be finite, got {alpha}")


@scale.reference
def _(x: np.ndarray, alpha: float) -> np.ndarray:
    compute = compute_dtype(x)
    return finish(up(x, compute) * compute.type(alpha), x.dtype, compute)


@operator
def scale_by(args: Args, x: Array, factor: Array) -> None:
    """x * factor[0], factor float32 [1] on the device."""
    args.any_shape("x", x).array("factor", factor, "1", "f32")


@scale_by.reference
def _(x: np.ndarray, factor: np.ndarray) -> np.ndarray:
    compute = compute_dtype(x, factor)
    return finish(up(x, compute) * up(factor, compute)[0], x.dtype, compute)


@operator
def softcap(args: Args, x: Array, cap: float) -> None:
    """cap * tanh(x / cap). No gradient: attention and linear_cross_entropy differentiate their own softcap."""
    args.any_shape("x", x).rule(cap != 0, "cap must be positive, got 0; without a cap, do not call softcap")
    check_softcap(args, "cap", cap)


def check_softcap(args: Args, name: str, cap: float) -> None:
    args.rule(cap == 0 or 1e-6 <= cap <= 1e6, f"{name} must be 0 (none) or from 1e-6 to 1e6, got {cap}")


@softcap.reference
def _(x: np.ndarray, cap: float) -> np.ndarray:
    compute = compute_dtype(x)
    return finish(capped(up(x, compute), cap), x.dtype, compute)


def capped(x: np.ndarray, cap: float) -> np.ndarray:
    values: np.ndarray = np.tanh(x / x.dtype.type(cap)) * x.dtype.type(cap)
    return values


def softcap_slope(y: np.ndarray, cap: float) -> np.ndarray:
    """Return the derivative of y = cap * tanh(x / cap), from y."""
    values: np.ndarray = 1 - np.square(y / y.dtype.type(cap))
    return values


@differentiable
def cast(ctx: Context, x: Tensor, dtype: DType) -> Tensor:
    """x in another dtype."""
    y: Tensor = ctx.device.cast(x, dtype)
    ctx.dtype = x.dtype
    return y


@cast.backward
def _(ctx: Context, dy: Array) -> Any:
    return (ctx.device.cast(dy, ctx.dtype),)


@cast.operator
def _(args: Args, x: Array, dtype: DType) -> dict[str, Any]:
    """x in another dtype. Every device casts from bfloat16; only devices that have bfloat16 cast to it."""
    return {"dtype": args.any_shape("x", x, "weight").dtype("dtype", dtype, x.dtype)}


@cast.reference
def _(x: np.ndarray, dtype: Any) -> np.ndarray:
    return x.astype(dtype)


@differentiable
def bias(ctx: Context, x: Tensor, b: Weight) -> Tensor:
    """x [..., C] + b float32 [C]."""
    out: Tensor = with_shape(ctx, ctx.device.bias(as_rows(ctx, x), b), x.shape)
    return out


@bias.backward
def _(ctx: Context, dy: Array) -> Any:
    return dy if ctx.needs_grad[0] else None, column_sums(ctx, 1, dy)


def column_sums(ctx: Context, i: int, dy: Array) -> Array | None:
    """Return the gradient of argument i, a bias [C]: the sum of dy's rows.

    If the leaf has a gradient buffer, the sum is added to it and the result is None.
    """
    if not ctx.needs_grad[i]:
        return None
    buffer = ctx.grad_buffer(i)
    total = ctx.device.sum_rows(as_rows(ctx, dy), out=buffer, accumulate=buffer is not None)
    return total if buffer is None else None


@bias.operator
def _(args: Args, x: Array, b: Array) -> None:
    """x [R, C] + b float32 [C]."""
    args.array("x", x, "R C").array("b", b, "C", "f32")


@bias.reference
def _(x: np.ndarray, b: np.ndarray) -> np.ndarray:
    compute = compute_dtype(x, b)
    return finish(up(x, compute) + up(b, compute), x.dtype, compute)


@operator
def sum_rows(args: Args, x: Array, *, out: Array | None = None, accumulate: bool = False) -> None:
    """[R, C] -> float32 [C], into `out` where given (added to it when `accumulate`); the backward of bias."""
    args.array("x", x, "R C")
    if out is not None:
        args.array("out", out, "C", "f32")


@sum_rows.reference
def _(x: np.ndarray, out: np.ndarray | None, accumulate: bool) -> np.ndarray:
    compute = compute_dtype(x)
    return store(np.sum(up(x, compute), axis=0), out, accumulate, np.float32, compute)


@differentiable
def sum(ctx: Context, x: Tensor) -> Tensor:
    """All elements -> float32 [1]."""
    total: Tensor = ctx.device.sum(x)
    ctx.shape, ctx.dtype = tuple(x.shape), x.dtype
    return total


@sum.backward
def _(ctx: Context, dy: Array) -> Any:
    ones = ctx.device.empty(ctx.shape, ctx.dtype)
    ctx.device.fill(ones, 1.0)
    return (ctx.device.scale_by(ones, dy),)


@sum.operator
def _(args: Args, x: Array) -> None:
    """All elements -> float32 [1]."""
    args.any_shape("x", x)


@sum.reference
def _(x: np.ndarray) -> np.ndarray:
    compute = compute_dtype(x)
    values: np.ndarray = np.sum(up(x, compute)).reshape(1)
    return values
