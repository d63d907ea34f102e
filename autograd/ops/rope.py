"""Rotary position embedding, half-split: element i pairs with i + D/2. Source: Su et al., RoFormer (2021)."""

from __future__ import annotations

from typing import Any

from wgrad.autograd import schema
from wgrad.autograd.function import Context, Function
from wgrad.device.contract import Array


class Rope(Function):
    """x [N, H, D], cos and sin float32 [P, D/2], positions int32 [N]. The backward rotates the other way."""

    @staticmethod
    def forward(ctx: Context, x: Array, *, cos: Array, sin: Array, positions: Array) -> Array:
        schema.rope(ctx.device, x, cos, sin, positions)
        ctx.save(cos, sin, positions)
        return ctx.device.rope(x, cos, sin, positions)

    @staticmethod
    def backward(ctx: Context, dy: Array) -> Any:
        return (ctx.device.rope(dy, *ctx.saved, inverse=True),)
