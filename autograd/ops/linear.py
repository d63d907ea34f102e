"""The linear layer on a frozen NF4 weight, which is decoded inside the product; no gradient for the weight.

Source: Dettmers et al., QLoRA (2023).
"""

from __future__ import annotations

from typing import Any

from wgrad.autograd import schema
from wgrad.autograd.function import Context, Function
from wgrad.autograd.ops.elementwise import as_rows, column_sums, with_shape
from wgrad.autograd.ops.gemm import residual_grad
from wgrad.autograd.ops.lora import lora_add_grad_x, lora_forward, lora_grad_u, lora_grad_weights
from wgrad.device.contract import Array, NF4Array


class LinearNF4(Function):
    """y = x dequant(W)^T + u B^T + bias + residual, u = scaling * dropout(x) A^T. Inputs: x, bias, residual, a, b."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Array,
        bias: Array | None,
        residual: Array | None,
        a: Array | None,
        b: Array | None,
        *,
        weight: NF4Array,
        lora: dict[str, Any] | None = None,
        dtype: Any = None,
    ) -> Array:
        dtype = schema.linear(ctx.device, "linear_nf4", x, weight, bias, residual, a, b, dtype)
        rows, u = as_rows(ctx, x), None
        if lora is not None:
            schema.lora("linear_nf4", ctx.device, **lora)
            u = lora_forward(ctx, rows, a, lora)
        ctx.save(rows if lora is not None else None, a, b, u)
        ctx.weight, ctx.lora, ctx.x_shape, ctx.x_dtype = weight, lora, tuple(x.shape), x.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        y = ctx.device.linear_nf4(
            rows,
            weight,
            bias=bias,
            residual=None if residual is None else as_rows(ctx, residual),
            lowrank=None if u is None else (u, b),
            dtype=dtype,
        )
        return with_shape(ctx, y, (*ctx.x_shape[:-1], y.shape[-1]))

    @staticmethod
    def backward(ctx: Context, dy: Array) -> Any:
        x, a, b, u = ctx.saved
        rows, lora = as_rows(ctx, dy), ctx.lora
        du = None if lora is None else lora_grad_u(ctx, rows, b, lora)
        dx = da = db = None
        if ctx.needs_grad[0]:
            fused = (du, a) if lora is not None and lora["dropout"] == 0 else None
            dx = ctx.device.linear_nf4_backward(rows, ctx.weight, lowrank=fused, dtype=ctx.x_dtype)
            if lora is not None and fused is None:
                dx = lora_add_grad_x(ctx, dx, du, a, lora)
            dx = with_shape(ctx, dx, ctx.x_shape)
        if lora is not None:
            da, db = lora_grad_weights(ctx, (3, 4), rows, du, u, x, lora)
        return dx, column_sums(ctx, 1, dy), residual_grad(ctx, 2, dy), da, db
