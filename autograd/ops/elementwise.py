"""Plain operators: add, mul, scale, cast, bias, sum, mask, softmax, dropout and reshape."""

from __future__ import annotations

import math
from typing import Any

from wgrad.autograd import schema
from wgrad.autograd.function import Context, Function
from wgrad.device.contract import Array


def as_rows(ctx: Context, array: Array) -> Array:
    """[..., C] -> [R, C], the same storage."""
    if len(array.shape) == 2:
        return array
    columns = int(array.shape[-1])
    return ctx.device.view(array, (math.prod(array.shape[:-1]), columns))


def with_shape(ctx: Context, array: Array, shape: Any) -> Array:
    """The same storage in another shape."""
    return array if tuple(array.shape) == tuple(shape) else ctx.device.view(array, tuple(shape))


class Reshape(Function):
    @staticmethod
    def forward(ctx: Context, x: Array, *, shape: tuple[int, ...]) -> Array:
        ctx.shape = tuple(x.shape)
        return ctx.device.view(x, schema.reshape(x, shape))

    @staticmethod
    def backward(ctx: Context, dy: Array) -> Any:
        return (ctx.device.view(dy, ctx.shape),)


class Add(Function):
    """a + b, same shape; the result has a's dtype."""

    @staticmethod
    def forward(ctx: Context, a: Array, b: Array) -> Array:
        schema.same_shape("add", ctx.device, a, b)
        ctx.dtypes = a.dtype, b.dtype
        return ctx.device.add(a, b)

    @staticmethod
    def backward(ctx: Context, dy: Array) -> Any:
        return tuple(
            None if not wanted else dy if dtype == dy.dtype else ctx.device.cast(dy, dtype)
            for wanted, dtype in zip(ctx.needs_grad, ctx.dtypes)
        )


class Mul(Function):
    """a * b, same shape; the result has a's dtype."""

    @staticmethod
    def forward(ctx: Context, a: Array, b: Array) -> Array:
        schema.same_shape("mul", ctx.device, a, b)
        ctx.save(a if ctx.needs_grad[1] else None, b if ctx.needs_grad[0] else None)
        ctx.dtypes = a.dtype, b.dtype
        return ctx.device.mul(a, b)

    @staticmethod
    def backward(ctx: Context, dy: Array) -> Any:
        a, b = ctx.saved
        da = ctx.device.mul(dy, b) if ctx.needs_grad[0] else None
        db = ctx.device.mul(dy, a) if ctx.needs_grad[1] else None
        if db is not None and db.dtype != ctx.dtypes[1]:
            db = ctx.device.cast(db, ctx.dtypes[1])
        return da, db


class Scale(Function):
    """alpha * x."""

    @staticmethod
    def forward(ctx: Context, x: Array, *, alpha: float) -> Array:
        schema.scale(ctx.device, x, alpha)
        ctx.alpha = alpha
        return ctx.device.scale(x, alpha)

    @staticmethod
    def backward(ctx: Context, dy: Array) -> Any:
        return (ctx.device.scale(dy, ctx.alpha),)


class Cast(Function):
    @staticmethod
    def forward(ctx: Context, x: Array, *, dtype: Any) -> Array:
        ctx.dtype = x.dtype
        return ctx.device.cast(x, schema.cast(ctx.device, x, dtype))

    @staticmethod
    def backward(ctx: Context, dy: Array) -> Any:
        return (ctx.device.cast(dy, ctx.dtype),)


class Bias(Function):
    """x [..., C] + b [C]."""

    @staticmethod
    def forward(ctx: Context, x: Array, b: Array) -> Array:
        schema.bias(ctx.device, x, b)
        return with_shape(ctx, ctx.device.bias(as_rows(ctx, x), b), x.shape)

    @staticmethod
    def backward(ctx: Context, dy: Array) -> Any:
        return dy if ctx.needs_grad[0] else None, column_sums(ctx, 1, dy)


def column_sums(ctx: Context, i: int, dy: Array) -> Array | None:
    """The gradient of a bias [C], input i: the sum of dy's rows, into the leaf's buffer where it has one."""
    if not ctx.needs_grad[i]:
        return None
    buffer = ctx.grad_buffer(i)
    total = ctx.device.sum_rows(as_rows(ctx, dy), out=buffer, accumulate=buffer is not None)
    return total if buffer is None else None


class Sum(Function):
    """All elements -> float32 [1]."""

    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        schema.unary("sum", ctx.device, x)
        ctx.shape, ctx.dtype = tuple(x.shape), x.dtype
        return ctx.device.sum(x)

    @staticmethod
    def backward(ctx: Context, dy: Array) -> Any:
        ones = ctx.device.empty(ctx.shape, ctx.dtype)
        ctx.device.fill(ones, 1.0)
        return (ctx.device.scale_by(ones, dy),)


class Mask(Function):
    """x where keep (uint32, same shape) is non-zero, else value."""

    @staticmethod
    def forward(ctx: Context, x: Array, *, keep: Array, value: float) -> Array:
        schema.mask(ctx.device, x, keep)
        ctx.save(keep)
        return ctx.device.mask(x, keep, value)

    @staticmethod
    def backward(ctx: Context, dy: Array) -> Any:
        (keep,) = ctx.saved
        return (ctx.device.mask(dy, keep, 0.0),)


class Softmax(Function):
    """Over the last axis; dx = y (dy - sum(dy y))."""

    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        schema.softmax(ctx.device, x)
        y = with_shape(ctx, ctx.device.softmax(as_rows(ctx, x)), x.shape)
        ctx.save(y)
        return y

    @staticmethod
    def backward(ctx: Context, dy: Array) -> Any:
        (y,) = ctx.saved
        return (with_shape(ctx, ctx.device.softmax_backward(as_rows(ctx, dy), as_rows(ctx, y)), y.shape),)


class Dropout(Function):
    """Keep with probability 1 - p and divide by 1 - p. Its backward is the same with the same numbers."""

    @staticmethod
    def forward(ctx: Context, x: Array, *, p: float, seed: Array, stream: int) -> Array:
        schema.dropout(ctx.device, x, p, seed, stream)
        ctx.save(seed)
        ctx.p, ctx.stream = p, stream
        return ctx.device.dropout(x, p, seed, stream)

    @staticmethod
    def backward(ctx: Context, dy: Array) -> Any:
        (seed,) = ctx.saved
        return (ctx.device.dropout(dy, ctx.p, seed, ctx.stream),)
