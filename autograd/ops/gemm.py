"""The matrix product and the linear layer on a plain weight, with bias, residual and LoRA in the epilogue."""

from __future__ import annotations

from typing import Any

from wgrad.autograd import schema
from wgrad.autograd.function import Context, Function
from wgrad.autograd.ops.elementwise import as_rows, column_sums, with_shape
from wgrad.autograd.ops.lora import lora_add_grad_x, lora_forward, lora_grad_u, lora_grad_weights, weight_grad
from wgrad.device.contract import Array


class Gemm(Function):
    """alpha * op(a) op(b), batched or not; without `dtype` the result has a's."""

    @staticmethod
    def forward(ctx: Context, a: Array, b: Array, *, trans_a: bool, trans_b: bool, alpha: float, dtype: Any) -> Array:
        dtype = schema.gemm(ctx.device, a, b, trans_a=trans_a, trans_b=trans_b, alpha=alpha, dtype=dtype)
        ctx.save(a, b)
        ctx.trans, ctx.alpha = (trans_a, trans_b), alpha
        return ctx.device.gemm(a, b, trans_a=trans_a, trans_b=trans_b, alpha=alpha, dtype=dtype)

    @staticmethod
    def backward(ctx: Context, dy: Array) -> Any:
        a, b = ctx.saved
        ta, tb = ctx.trans
        gemm, alpha = ctx.device.gemm, ctx.alpha
        da = db = None
        if ctx.needs_grad[0]:  # d op(a) = dy op(b)^T, transposed when a was
            da = (
                gemm(b, dy, trans_a=tb, trans_b=True, alpha=alpha, dtype=a.dtype)
                if ta
                else gemm(dy, b, trans_b=not tb, alpha=alpha, dtype=a.dtype)
            )
        if ctx.needs_grad[1]:  # d op(b) = op(a)^T dy, transposed when b was
            db = (
                gemm(dy, a, trans_a=True, trans_b=ta, alpha=alpha, dtype=b.dtype)
                if tb
                else gemm(a, dy, trans_a=not ta, alpha=alpha, dtype=b.dtype)
            )
        return da, db


class Linear(Function):
    """y = x W^T + u B^T + bias + residual, u = scaling * dropout(x) A^T. Inputs: x, weight, bias, residual, a, b."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Array,
        weight: Array,
        bias: Array | None,
        residual: Array | None,
        a: Array | None,
        b: Array | None,
        *,
        lora: dict[str, Any] | None = None,
        dtype: Any = None,
    ) -> Array:
        dtype = schema.linear(ctx.device, "linear", x, weight, bias, residual, a, b, dtype)
        rows, u = as_rows(ctx, x), None
        if lora is not None:
            schema.lora("linear", ctx.device, **lora)
            u = lora_forward(ctx, rows, a, lora)
        wants_x = ctx.needs_grad[1] or lora is not None
        ctx.save(rows if wants_x else None, weight if ctx.needs_grad[0] else None, a, b, u)
        ctx.x_shape, ctx.x_dtype, ctx.lora = tuple(x.shape), x.dtype, lora
        ctx.residual_dtype = None if residual is None else residual.dtype
        y = ctx.device.gemm(
            rows,
            weight,
            trans_b=True,
            bias=bias,
            residual=None if residual is None else as_rows(ctx, residual),
            lowrank=None if u is None else (u, b),
            dtype=dtype,
        )
        return with_shape(ctx, y, (*ctx.x_shape[:-1], y.shape[-1]))

    @staticmethod
    def backward(ctx: Context, dy: Array) -> Any:
        x, weight, a, b, u = ctx.saved
        rows, lora = as_rows(ctx, dy), ctx.lora
        du = None if lora is None else lora_grad_u(ctx, rows, b, lora)
        dx = da = db = None
        if ctx.needs_grad[0]:
            fused = (du, a) if lora is not None and lora["dropout"] == 0 else None
            dx = ctx.device.gemm(rows, weight, lowrank=fused, dtype=ctx.x_dtype)
            if lora is not None and fused is None:
                dx = lora_add_grad_x(ctx, dx, du, a, lora)
            dx = with_shape(ctx, dx, ctx.x_shape)
        dweight = weight_grad(ctx, 1, rows, x) if ctx.needs_grad[1] else None
        if lora is not None:
            da, db = lora_grad_weights(ctx, (4, 5), rows, du, u, x, lora)
        return dx, dweight, column_sums(ctx, 2, dy), residual_grad(ctx, 3, dy), da, db


def residual_grad(ctx: Context, i: int, dy: Array) -> Array | None:
    """The gradient of a residual, input i: dy itself, in the residual's dtype."""
    if not ctx.needs_grad[i]:
        return None
    return dy if dy.dtype == ctx.residual_dtype else ctx.device.cast(dy, ctx.residual_dtype)
