"""Softmax over the last axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.function import Context, differentiable
from wgrad.autograd.operators import operator
from wgrad.autograd.precision import compute_dtype, finish, up
from wgrad.autograd.rows import as_rows, with_shape
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array


@differentiable
def softmax(ctx: Context, x: Tensor) -> Tensor:
    """Softmax over the last axis."""
    y: Tensor = with_shape(ctx, ctx.device.softmax(as_rows(ctx, x)), x.shape)
    ctx.save(y)
    return y


@softmax.backward
def _(ctx: Context, dy: Array) -> Any:
    (y,) = ctx.saved
    return (with_shape(ctx, ctx.device.softmax_backward(as_rows(ctx, dy), as_rows(ctx, y)), y.shape),)


@softmax.operator
def _(args: Args, x: Array) -> None:
    """Softmax over the last axis of [R, C]."""
    args.array("x", x, "R C")


@softmax.reference
def _(x: np.ndarray) -> np.ndarray:
    compute = compute_dtype(x)
    wide = up(x, compute)
    e = np.exp(wide - wide.max(axis=-1, keepdims=True))
    return finish(e / e.sum(axis=-1, keepdims=True), x.dtype, compute)


@operator
def softmax_backward(args: Args, dy: Array, y: Array) -> None:
    """y, the result of `softmax` -> dx = y (dy - sum(dy y))."""
    args.array("dy", dy, "R C").array("y", y, "R C")


@softmax_backward.reference
def _(dy: np.ndarray, y: np.ndarray) -> np.ndarray:
    compute = compute_dtype(dy, y)
    grad, out = up(dy, compute), up(y, compute)
    return finish(out * (grad - np.sum(grad * out, axis=-1, keepdims=True)), dy.dtype, compute)
