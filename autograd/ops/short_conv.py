"""A short causal convolution per channel within documents, optionally followed by SiLU."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.function import Context, Weight, differentiable
from wgrad.autograd.operators import operator
from wgrad.autograd.ops.activation import sigmoid
from wgrad.autograd.precision import compute_dtype, finish, up
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array


@differentiable
def short_conv(
    ctx: Context, x: Tensor, weight: Weight, doc_start: Array, cache_len: Array, *, silu: bool = True
) -> Tensor:
    """x [B, E, C], weight float32 [C, W] -> silu of the sum over taps j of x[t - j] weight[W - 1 - j], [B, T, C]; with
    silu False the sum itself.

    doc_start int32 [B, T] and cache_len [1] as in `attention`: a tap before a token's document counts as 0, as does one
    before x. The first E - T of the E tokens come before those of the output."""
    y = ctx.device.short_conv(x, weight, doc_start, cache_len, silu=silu)
    ctx.save(x, weight, doc_start, cache_len, silu)
    out: Tensor = y
    return out


@short_conv.backward
def _(ctx: Context, dy: Array) -> Any:
    *saved, silu = ctx.saved
    return ctx.device.short_conv_backward(dy, *saved, need_dweight=ctx.needs_grad[1], silu=silu)


@short_conv.operator
def _(args: Args, x: Array, weight: Array, doc_start: Array, cache_len: Array, *, silu: bool = True) -> None:
    """-> y [B, T, C] of x's dtype."""
    _check(args, x, weight, doc_start, cache_len)


def _check(args: Args, x: Array, weight: Array, doc_start: Array, cache_len: Array) -> None:
    args.array("x", x, "B E C").array("weight", weight, "C W", "f32")
    args.array("doc_start", doc_start, "B T", "i32").array("cache_len", cache_len, "1", "i32")
    tokens, given = args.size["T"], args.size["E"]
    args.rule(tokens <= given, f"x must have at least the {tokens} tokens of doc_start, got {given}")


def _taps(
    x: np.ndarray, weight: np.ndarray, doc_start: np.ndarray, cache_len: np.ndarray
) -> list[tuple[int, int, np.ndarray]]:
    """Return for every tap the first output token that has it, the token of x that it reads there, and a mask
    [B, T', 1] of the output tokens from there on for which it counts."""
    tokens = doc_start.shape[1]
    before = x.shape[1] - tokens
    found = []
    for j in range(weight.shape[1]):
        first = max(0, j - before)
        if first < tokens:
            token = np.arange(first, tokens)
            found.append((first, first + before - j, (token - j + cache_len[0] >= doc_start[:, first:])[..., None]))
        else:
            found.append((tokens, 0, np.zeros((len(doc_start), 0, 1), bool)))
    return found


def _sums(
    x: np.ndarray, weight: np.ndarray, doc_start: np.ndarray, cache_len: np.ndarray, compute: np.dtype
) -> np.ndarray:
    wide, taps = up(x, compute), up(weight, compute)
    tokens = doc_start.shape[1]
    sums = np.zeros((len(x), tokens, x.shape[2]), compute)
    for j, (first, at, counts) in enumerate(_taps(x, weight, doc_start, cache_len)):
        sums[:, first:] += np.where(counts, wide[:, at : at + tokens - first] * taps[:, -1 - j], 0)
    return sums


@short_conv.reference
def _(x: np.ndarray, weight: np.ndarray, doc_start: np.ndarray, cache_len: np.ndarray, silu: bool) -> np.ndarray:
    compute = compute_dtype(x, weight)
    sums = _sums(x, weight, doc_start, cache_len, compute)
    return finish(sums * sigmoid(sums) if silu else sums, x.dtype, compute)


@operator
def short_conv_backward(
    args: Args,
    dy: Array,
    x: Array,
    weight: Array,
    doc_start: Array,
    cache_len: Array,
    *,
    need_dweight: bool = True,
    silu: bool = True,
) -> None:
    """-> dx of x's dtype, dweight float32 [C, W] or None."""
    _check(args, x, weight, doc_start, cache_len)
    args.array("dy", dy, "B T C")


@short_conv_backward.reference
def _(
    dy: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    doc_start: np.ndarray,
    cache_len: np.ndarray,
    need_dweight: bool,
    silu: bool,
) -> tuple[np.ndarray, np.ndarray | None]:
    compute = compute_dtype(dy, x, weight)
    sums, tokens = _sums(x, weight, doc_start, cache_len, compute), doc_start.shape[1]
    s = sigmoid(sums)
    grad = up(dy, compute) * (s * (1 + sums * (1 - s)) if silu else 1)
    wide, taps = up(x, compute), up(weight, compute)
    dx, dweight = np.zeros(x.shape, compute), np.zeros(weight.shape, compute)
    for j, (first, at, counts) in enumerate(_taps(x, weight, doc_start, cache_len)):
        counted = np.where(counts, grad[:, first:], 0)
        dx[:, at : at + tokens - first] += counted * taps[:, -1 - j]
        dweight[:, -1 - j] = np.einsum("btc,btc->c", counted, wide[:, at : at + tokens - first])
    return finish(dx, x.dtype, compute), dweight if need_dweight else None
