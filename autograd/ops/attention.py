"""Causal attention with grouped heads, a sliding window and packed documents. Source: Dao, FlashAttention-2 (2023)."""

from __future__ import annotations

from typing import Any

from wgrad.autograd import schema
from wgrad.autograd.function import Context, Function
from wgrad.device.contract import Array


class Attention(Function):
    """q [B, T, H, D], k v [B, S, G, D] -> [B, T, H, D]. Saves o and lse; scores are made again in the backward."""

    @staticmethod
    def forward(
        ctx: Context, q: Array, k: Array, v: Array, *, doc_start: Array, cache_len: Array, scale: float, window: int
    ) -> Array:
        schema.attention(ctx.device, q, k, v, doc_start, cache_len, window, any(ctx.needs_grad))
        o, lse = ctx.device.attention(q, k, v, doc_start, cache_len, scale=scale, window=window)
        ctx.save(q, k, v, o, lse, doc_start)
        ctx.scale, ctx.window = scale, window
        return o

    @staticmethod
    def backward(ctx: Context, do: Array) -> Any:
        return ctx.device.attention_backward(do, *ctx.saved, scale=ctx.scale, window=ctx.window)
