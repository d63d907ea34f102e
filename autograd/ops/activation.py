"""SiLU, GELU (tanh form) and their gated forms. Source: Shazeer, GLU Variants Improve Transformer (2020)."""

from __future__ import annotations

from typing import Any

from wgrad.autograd import schema
from wgrad.autograd.function import Context, Function
from wgrad.device.contract import Array


class Silu(Function):
    """x * sigmoid(x)."""

    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        schema.unary("silu", ctx.device, x)
        ctx.save(x)
        return ctx.device.silu(x)

    @staticmethod
    def backward(ctx: Context, dy: Array) -> Any:
        return (ctx.device.silu_backward(dy, *ctx.saved),)


class Gelu(Function):
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""

    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        schema.unary("gelu", ctx.device, x)
        ctx.save(x)
        return ctx.device.gelu(x)

    @staticmethod
    def backward(ctx: Context, dy: Array) -> Any:
        return (ctx.device.gelu_backward(dy, *ctx.saved),)


class SwiGLU(Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Context, gate: Array, up: Array) -> Array:
        schema.gated("swiglu", ctx.device, gate, up)
        ctx.save(gate, up)
        return ctx.device.swiglu(gate, up)

    @staticmethod
    def backward(ctx: Context, dy: Array) -> Any:
        return ctx.device.swiglu_backward(dy, *ctx.saved)


class GeGLU(Function):
    """gelu(gate) * up."""

    @staticmethod
    def forward(ctx: Context, gate: Array, up: Array) -> Array:
        schema.gated("geglu", ctx.device, gate, up)
        ctx.save(gate, up)
        return ctx.device.geglu(gate, up)

    @staticmethod
    def backward(ctx: Context, dy: Array) -> Any:
        return ctx.device.geglu_backward(dy, *ctx.saved)
