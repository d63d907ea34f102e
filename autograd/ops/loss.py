"""Cross-entropy of a linear layer, without its logits ever standing in memory whole.

Source: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models (2024); Hsu et al., Liger Kernel (2024).
"""

from __future__ import annotations

from typing import Any

from wgrad.autograd import schema
from wgrad.autograd.function import Context, Function
from wgrad.device.contract import Array


class LinearCrossEntropy(Function):
    """x [N, C], weight [V, C], targets int32 [N] (-100 ignored) -> float32 [1], summed over the targets.

    The gradients come out of the forward (logits stand there a chunk at a time); the backward multiplies them by its
    seed, in float32, before x's dtype is restored: a loss scale must act before the rounding to float16.
    """

    @staticmethod
    def forward(ctx: Context, x: Array, weight: Array, *, targets: Array) -> Array:
        schema.linear_cross_entropy(ctx.device, x, weight, targets)
        need_dx, need_dweight = ctx.needs_grad
        loss, dx, dweight = ctx.device.linear_cross_entropy(
            x, weight, targets, need_dx=need_dx, need_dweight=need_dweight
        )
        ctx.save(dx, dweight)
        ctx.dtype = x.dtype
        return loss

    @staticmethod
    def backward(ctx: Context, dloss: Array) -> Any:
        dx, dweight = ctx.saved
        if dx is not None:
            dx = ctx.device.scale_by(dx, dloss)
            dx = dx if dx.dtype == ctx.dtype else ctx.device.cast(dx, ctx.dtype)
        return dx, None if dweight is None else ctx.device.scale_by(dweight, dloss)
