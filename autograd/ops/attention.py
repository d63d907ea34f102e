"""Causal attention with grouped heads, a sliding window and packed documents. Source: Dao, FlashAttention-2 (2023).

The reference takes blocks of query rows with an exact softmax in each, so the T x S scores are never in memory at
once. The forward saves lse (the log of the sum of exponentials), and the backward recomputes the probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.checkpoint import once
from wgrad.autograd.function import Context, differentiable
from wgrad.autograd.operators import operator
from wgrad.autograd.ops.elementwise import capped, check_softcap, softcap_slope
from wgrad.autograd.precision import compute_dtype, finish, up
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import MAX_HEAD_DIM, Array
from wgrad.device.host_matmul import host_matmul

# Scores of one block of queries, all heads: at most this many elements (a single row is always taken).
BLOCK_ELEMENTS = 1 << 21
MASKED = -1e30  # finite, as on the devices: exp(MASKED - lse) is 0


def check_heads(args: Args, window: int, softcap: float) -> None:
    """Check the rules of every attention: query heads H, key heads G, their width D, and the options."""
    size = args.size
    args.rule(
        size["H"] % size["G"] == 0,
        f"q must have a multiple of the key heads G = {size['G']}, got H = {size['H']}; "
        "check num_attention_heads and num_key_value_heads",
    )
    args.rule(size["D"] <= MAX_HEAD_DIM, f"q must have a head width of at most {MAX_HEAD_DIM}, got {size['D']}")
    args.rule(window >= 0, f"window must be 0 (none) or positive, got {window}")
    check_softcap(args, "softcap", softcap)


def _heads(args: Args, q: Array, k: Array, v: Array, doc_start: Array, window: int, softcap: float) -> None:
    args.array("q", q, "B T H D").array("k", k, "B S G D").array("v", v, "B S G D")
    args.array("doc_start", doc_start, "B T", "i32")
    size = args.size
    args.rule(size["T"] <= size["S"], f"k must hold a key for every query, got T = {size['T']} > S = {size['S']}")
    check_heads(args, window, softcap)
    args.rule(q.dtype == k.dtype == v.dtype, f"q, k, v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast")


@differentiable
def attention(
    ctx: Context,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    doc_start: Array,
    cache_len: Array,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Causal attention of q [B, T, H, D] on k, v [B, S, G, D] -> [B, T, H, D]; the operator below describes the mask.
    A gradient needs T = S and cache_len = 0: o and lse are saved, and the backward recomputes the scores."""
    o: Tensor
    o, lse = attend_once(ctx, q, k, v, doc_start, cache_len, scale=scale, window=window, softcap=softcap)
    ctx.save(q, k, v, o, lse, doc_start)
    return o


def attend_once(
    ctx: Context, q: Tensor, k: Tensor, v: Tensor, doc_start: Array, cache_len: Array, **options: Any
) -> tuple[Any, Any]:
    """Return o and lse of the device's `attention`; recomputed layers keep both. Sets `ctx.options`."""
    ctx.options = options
    o, lse = once(lambda: ctx.device.attention(q, k, v, doc_start, cache_len, **options))
    if any(ctx.needs_grad):
        has_key_for_each(Args(ctx.name), q.shape[1], k.shape[1])
    return o, lse


@attention.backward
def _(ctx: Context, do: Array) -> Any:
    return ctx.device.attention_backward(do, *ctx.saved, **ctx.options)


@attention.operator
def _(
    args: Args,
    q: Array,
    k: Array,
    v: Array,
    doc_start: Array,
    cache_len: Array,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """q [B, T, H, D], k v [B, S, G, D] (H a multiple of G) -> o [B, T, H, D] (q's dtype), lse float32 [B, H, T].

    Query t is at key index i = cache_len[0] + t (cache_len int32 [1]; 0 in training, the cache length in
    decoding) and sees keys j with doc_start[b, t] <= j <= i, and i - j < window where window > 0.
    doc_start int32 [B, T]: first key index of the query's document (packing); rising within a row.
    A score is s = scale q k, or softcap * tanh(s / softcap) where softcap > 0.
    """
    _heads(args, q, k, v, doc_start, window, softcap)
    args.array("cache_len", cache_len, "1", "i32")


@attention.reference
def attention_in_numpy(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    doc_start: np.ndarray,
    cache_len: np.ndarray,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[np.ndarray, np.ndarray]:
    compute = compute_dtype(q, k, v)
    batch, length, heads, width = q.shape
    o = np.empty(q.shape, compute)
    lse = np.empty((batch, heads, length), compute)
    for b, rows, keys, seen in _blocks(doc_start, int(cache_len[0]), k.shape[1], heads, window):
        scores = _masked(_scores(q[b, rows], k[b, keys], scale, softcap, compute), seen)  # [G, H / G, t, s]
        top = scores.max(axis=-1, keepdims=True)
        p = np.exp(scores - top)
        total = p.sum(axis=-1, keepdims=True)
        values = up(v[b, keys], compute).transpose(1, 0, 2)[:, None]  # [G, 1, s, D]
        o[b, rows] = (host_matmul(p, values) / total).reshape(heads, -1, width).transpose(1, 0, 2)
        lse[b, :, rows] = (top + np.log(total)).reshape(heads, -1)
    return finish(o, q.dtype, compute), lse


@operator
def attention_backward(
    args: Args,
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    doc_start: Array,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """-> dq, dk, dv (shapes and dtypes of q, k, v). T = S and cache_len = 0. Deterministic."""
    _heads(args, q, k, v, doc_start, window, softcap)
    has_key_for_each(args, args.size["T"], args.size["S"])
    args.array("do", do, "B T H D").array("o", o, "B T H D").array("lse", lse, "B H T", "f32")


def has_key_for_each(args: Args, queries: int, keys: int) -> None:
    """Check that there is a key for every query, as a backward needs; decoding has none."""
    args.rule(
        queries == keys,
        f"k must have as many tokens as q where a gradient is wanted, got T = {queries}, S = {keys}; "
        "use no_grad when decoding",
    )


@attention_backward.reference
def _(
    do: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    doc_start: np.ndarray,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    compute = compute_dtype(do, q, k, v, o, lse)
    heads, width, groups = q.shape[2], q.shape[3], k.shape[2]
    dq, dk, dv = np.empty(q.shape, compute), np.zeros(k.shape, compute), np.zeros(v.shape, compute)
    delta = np.sum(up(do, compute) * up(o, compute), axis=-1)  # [B, T, H]
    for b, rows, keys, seen in _blocks(doc_start, 0, k.shape[1], heads, window):
        scores = _scores(q[b, rows], k[b, keys], scale, softcap, compute)
        p = np.exp(_masked(scores, seen) - up(lse[b, :, rows], compute).reshape(groups, -1, scores.shape[2], 1))
        grad = _by_group(up(do[b, rows], compute), groups)  # [G, H / G, t, D]
        ds = host_matmul(grad, up(v[b, keys], compute).transpose(1, 2, 0)[:, None])
        ds = (ds - _by_group(delta[b, rows][..., None], groups)) * p * compute.type(scale)
        if softcap:
            ds *= softcap_slope(scores, softcap)
        dq[b, rows] = (
            host_matmul(ds, up(k[b, keys], compute).transpose(1, 0, 2)[:, None])
            .reshape(heads, -1, width)
            .transpose(1, 0, 2)
        )
        dk[b, keys] += _sum_heads(ds, _by_group(up(q[b, rows], compute), groups))
        dv[b, keys] += _sum_heads(p, grad)
    return finish(dq, q.dtype, compute), finish(dk, k.dtype, compute), finish(dv, v.dtype, compute)


def _blocks(
    doc_start: np.ndarray, cache_len: int, num_keys: int, heads: int, window: int
) -> Iterator[tuple[int, slice, slice, np.ndarray]]:
    """Yield batch index, query rows, key rows and mask [t, s] of every block of queries."""
    batch, length = doc_start.shape
    step = max(1, min(128, BLOCK_ELEMENTS // (heads * num_keys)))
    for b in range(batch):
        for first in range(0, length, step):
            rows = slice(first, min(length, first + step))
            index = cache_len + np.arange(rows.start, rows.stop)
            lowest = np.asarray(doc_start[b, rows], np.int64)
            if window > 0:
                lowest = np.maximum(lowest, index - window + 1)
            keys = slice(int(lowest.min()), int(index[-1]) + 1)
            j = np.arange(keys.start, keys.stop)
            yield b, rows, keys, (j >= lowest[:, None]) & (j <= index[:, None])


def _by_group(x: np.ndarray, groups: int) -> np.ndarray:
    """[t, H, D] -> [G, H / G, t, D]."""
    t, heads, width = x.shape
    return x.reshape(t, groups, heads // groups, width).transpose(1, 2, 0, 3)


def _scores(q: np.ndarray, k: np.ndarray, scale: float, softcap: float, compute: np.dtype) -> np.ndarray:
    """scale * q k^T, capped: q [t, H, D], k [s, G, D] -> [G, H / G, t, s]."""
    scores = host_matmul(_by_group(up(q, compute), k.shape[1]), up(k, compute).transpose(1, 2, 0)[:, None])
    scores *= compute.type(scale)
    return capped(scores, softcap) if softcap else scores


def _masked(scores: np.ndarray, seen: np.ndarray) -> np.ndarray:
    return np.where(seen, scores, scores.dtype.type(MASKED))


def _sum_heads(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Sum weights^T x over the heads of a group: [G, h, t, s], [G, h, t, D] -> [s, G, D]."""
    groups, h, t, s = weights.shape
    values: np.ndarray = host_matmul(
        weights.reshape(groups, h * t, s).swapaxes(1, 2), x.reshape(groups, h * t, -1)
    ).transpose(1, 0, 2)
    return values
