"""Attention with sinks: each head has one more score, of a key that every query sees and whose value is 0.

A sink only enlarges the sum of the softmax, so the output is o sigmoid(lse - sink). With that output and the logarithm
of the larger sum, the backward of attention gives the gradients of q, k and v.
Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks (2023); gpt-oss in transformers.
"""

from __future__ import annotations

from typing import Any

from wgrad.autograd.function import Context, Weight, differentiable
from wgrad.autograd.lazy import Lazy, apply, reduced, view_of
from wgrad.autograd.ops.attention import attend_once, attention
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array, Device


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Weight | None, *args: Any, **options: Any) -> Tensor:
    """Apply `attention`, with sinks if they are not None."""
    if sinks is None:
        return attention(q, k, v, *args, **options)
    return sink_attention(q, k, v, sinks, *args, **options)


@differentiable
def sink_attention(
    ctx: Context,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Weight,
    doc_start: Array,
    cache_len: Array,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """`attention` with sinks float32 [H], the score of each head's additional key."""
    plain, lse = attend_once(ctx, q, k, v, doc_start, cache_len, scale=scale, window=window, softcap=softcap)
    o: Tensor = with_sinks(plain, lse, sinks, ctx.device)
    batch, heads, length = lse.shape
    own, score = view_of(lse, ctx.device), view_of(sinks, ctx.device).viewed((1, heads, 1), (0, 1, 0))
    difference = apply("abs", own - score)
    larger = (apply("maximum", own, score) + apply("log", apply("exp", -difference) + 1.0)).array()
    ctx.save(q, k, v, o, larger, doc_start, sinks)
    return o


@sink_attention.backward
def _(ctx: Context, do: Array) -> Any:
    *saved, sinks = ctx.saved
    grads = ctx.device.attention_backward(do, *saved, **ctx.options)
    if not ctx.needs_grad[3]:
        return *grads, None
    o, lse = saved[3:5]
    inner = reduced("sum", view_of(do, ctx.device) * view_of(o, ctx.device), [3], keepdim=True)
    share = apply("exp", _as_heads(sinks, ctx.device) - _of_queries(lse, ctx.device))
    of_sinks = reduced("sum", -(share * inner), [0, 1, 3], keepdim=False)
    return *grads, of_sinks.array()


def with_sinks(o: Array, lse: Array, sinks: Array, device: Device) -> Any:
    """Return attention's output with sinks float32 [H], from its output o [B, T, H, D] and lse float32 [B, H, T]
    without them."""
    share = apply("sigmoid", _of_queries(lse, device) - _as_heads(sinks, device))
    return (view_of(o, device) * share).astype(o.dtype).array()


def _as_heads(sinks: Array, device: Device) -> Lazy:
    """Return sinks [H] as [1, 1, H, 1]."""
    return view_of(sinks, device).viewed((1, 1, sinks.shape[0], 1), (0, 0, 1, 0))


def _of_queries(lse: Array, device: Device) -> Lazy:
    """Return lse [B, H, T] as [B, T, H, 1]."""
    batch, heads, length = lse.shape
    return view_of(lse, device).viewed((batch, length, heads, 1), (heads * length, 1, length, 0))
