"""The gated delta rule: attention that is linear in the tokens, with a state of fixed size per head.

Each head keeps a state S [K, V]. A token decays it, corrects what it predicts for the token's key, and reads it:

    S = exp(g) S;  S = S + k (beta (v - S' k))';  y = S' q

q and k have length 1, and q is scaled by K ** -0.5. Over a chunk of tokens the corrections are the solution of a
triangular system and all else is matmuls; only the chunks are sequential (the WY form of DeltaNet).

Sources: Yang, Kautz and Hatamizadeh, Gated Delta Networks (arXiv 2412.06464); Yang et al., Parallelizing Linear
Transformers with the Delta Rule over Sequence Length (arXiv 2406.06484).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.checkpoint import once
from wgrad.autograd.function import Context, differentiable
from wgrad.autograd.operators import operator
from wgrad.autograd.ops.decays import Decays, gate_gradient
from wgrad.autograd.precision import compute_dtype, finish, up
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import DELTA_CHUNK, MAX_KEY_DIM, Array, delta_segment

_EPS = 1e-6  # of the lengths of q and k


@differentiable
def delta_rule(
    ctx: Context,
    qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    doc_start: Array,
    cache_len: Array,
    *,
    key_heads: int,
    key_dim: int,
    state: Array | None = None,
) -> Tensor:
    """qkv [B, T, 2 G K + H V], q and k of G key heads and v of H heads side by side; g (at most 0) and beta float32
    [B, T, H] -> [B, T, H, V]. Heads of values share key heads as in grouped attention. doc_start int32 [B, T] and
    cache_len [1] as in `attention`. state float32 [B, H, K, V]: the initial state, overwritten with the final one; it
    gets no gradient."""
    options = {"key_heads": key_heads, "key_dim": key_dim}
    y, states = once(lambda: ctx.device.delta_rule(qkv, g, beta, doc_start, cache_len, **options, state=state))
    ctx.save(qkv, g, beta, doc_start, cache_len, states)
    ctx.options = options
    out: Tensor = y
    return out


@delta_rule.backward
def _(ctx: Context, dy: Array) -> Any:
    return ctx.device.delta_rule_backward(dy, *ctx.saved, **ctx.options)


@delta_rule.operator
def _(
    args: Args,
    qkv: Array,
    g: Array,
    beta: Array,
    doc_start: Array,
    cache_len: Array,
    *,
    key_heads: int,
    key_dim: int,
    state: Array | None = None,
) -> None:
    """-> y [B, T, H, V] of qkv's dtype, and for the backward the states float32 [S, B, H, K, V] before every segment of
    `delta_segment` tokens; None where a state is given."""
    _check(args, qkv, g, beta, doc_start, cache_len, key_heads, key_dim)
    if state is not None:
        args.array("state", state, "B H K V", "f32")


def _check(
    args: Args, qkv: Array, g: Array, beta: Array, doc_start: Array, cache_len: Array, key_heads: int, key_dim: int
) -> None:
    args.array("qkv", qkv, "B T C").array("g", g, "B T H", "f32").array("beta", beta, "B T H", "f32")
    args.array("doc_start", doc_start, "B T", "i32").array("cache_len", cache_len, "1", "i32")
    heads, channels = args.size["H"], args.size["C"]
    values = channels - 2 * key_heads * key_dim
    args.rule(
        0 < key_heads <= heads and heads % key_heads == 0,
        f"the heads of g must be a multiple of key_heads, got {heads} and {key_heads}",
    )
    args.rule(
        0 < key_dim <= MAX_KEY_DIM and values > 0 and values % heads == 0,
        f"qkv must have 2 * {key_heads} * {key_dim} channels of q and k (key_dim at most {MAX_KEY_DIM}), then as many "
        f"of each of {heads} heads, got {channels}",
    )
    args.size |= {"K": key_dim, "V": values // heads}


@dataclass
class _Heads:
    """q and k of length 1 (q then scaled), and v, each [B, H, T, width]; g and beta [B, H, T]; starts [B, T], counted
    from the first of these tokens."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray
    starts: np.ndarray


@dataclass
class _Chunk:
    """A chunk of all heads."""

    decays: Decays
    system: np.ndarray  # the unit lower triangular one, before beta: k k' decay below the diagonal
    scores: np.ndarray  # q k' decay


def _heads(
    qkv: np.ndarray, g: np.ndarray, beta: np.ndarray, doc_start: np.ndarray, cache_len: np.ndarray,
    key_heads: int, key_dim: int, compute: np.dtype,
) -> tuple[_Heads, np.ndarray, np.ndarray]:  # fmt: skip
    """Return the heads, and the reciprocal lengths of q and of k, each [B, H, T, 1]."""
    batch, tokens, heads = g.shape
    wide, width = up(qkv, compute), key_heads * key_dim
    parts = wide[..., :width], wide[..., width : 2 * width]
    q, k = (np.repeat(x.reshape(batch, tokens, key_heads, key_dim), heads // key_heads, axis=2) for x in parts)
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, wide[..., 2 * width :].reshape(batch, tokens, heads, -1)))
    of_q, of_k = (1 / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + compute.type(_EPS)) for x in (q, k))
    decays, rates = (up(x, compute).transpose(0, 2, 1) for x in (g, beta))
    scale = compute.type(key_dim**-0.5)
    return _Heads(q * of_q * scale, k * of_k, v, decays, rates, doc_start - cache_len[0]), of_q, of_k


def _chunk(x: _Heads, at: int) -> _Chunk:
    decays = Decays.of(x.g, x.starts, at)
    k, q = x.k[:, :, at : decays.end], x.q[:, :, at : decays.end]
    system, scores = (y @ k.swapaxes(-1, -2) * decays.decay for y in (k, q))
    return _Chunk(decays, np.tril(system, -1), scores)


def _corrections(x: _Heads, c: _Chunk, state: np.ndarray) -> np.ndarray:
    """Return the values [B, H, n, V] that the tokens add to the state, each with its key."""
    d = c.decays
    part = slice(d.at, d.end)
    beta = x.beta[:, :, part, None]
    wanted = x.v[:, :, part] - d.inside[..., None] * (x.k[:, :, part] @ state)
    solved: np.ndarray = np.linalg.solve(np.eye(d.end - d.at, dtype=beta.dtype) + beta * c.system, beta * wanted)
    return solved


def _next(x: _Heads, c: _Chunk, state: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return the state after a chunk."""
    d = c.decays
    kept = (x.k[:, :, d.at : d.end] * d.to_end[..., None]).swapaxes(-1, -2)
    after: np.ndarray = d.whole[..., None, None] * state + kept @ new
    return after


@delta_rule.reference
def _(
    qkv: np.ndarray, g: np.ndarray, beta: np.ndarray, doc_start: np.ndarray, cache_len: np.ndarray,
    key_heads: int, key_dim: int, state: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray | None]:  # fmt: skip
    compute = compute_dtype(qkv, g, beta, state)
    x, _, _ = _heads(qkv, g, beta, doc_start, cache_len, key_heads, key_dim, compute)
    batch, heads, tokens, width = x.v.shape
    now = np.zeros((batch, heads, key_dim, width), compute) if state is None else up(state, compute)
    y, states, segment = np.empty(x.v.shape, compute), [], delta_segment(batch * heads)
    for at in range(0, tokens, DELTA_CHUNK):
        if at % segment == 0:
            states.append(now)
        c = _chunk(x, at)
        new = _corrections(x, c, now)
        end = c.decays.end
        y[:, :, at:end] = c.decays.inside[..., None] * (x.q[:, :, at:end] @ now) + c.scores @ new
        now = _next(x, c, now, new)
    if state is not None:
        state[...] = now
    result = finish(y.transpose(0, 2, 1, 3), qkv.dtype, compute)
    return result, finish(np.stack(states), np.float32, compute) if state is None else None


@operator
def delta_rule_backward(
    args: Args,
    dy: Array,
    qkv: Array,
    g: Array,
    beta: Array,
    doc_start: Array,
    cache_len: Array,
    states: Array,
    *,
    key_heads: int,
    key_dim: int,
) -> None:
    """-> dqkv of qkv's dtype, dg and dbeta float32 [B, T, H]. The states within a segment are recomputed from those
    that the forward returned."""
    _check(args, qkv, g, beta, doc_start, cache_len, key_heads, key_dim)
    args.array("dy", dy, "B T H V").array("states", states, "S B H K V", "f32")


@delta_rule_backward.reference
def _(
    dy: np.ndarray, qkv: np.ndarray, g: np.ndarray, beta: np.ndarray, doc_start: np.ndarray, cache_len: np.ndarray,
    states: np.ndarray, key_heads: int, key_dim: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    compute = compute_dtype(dy, qkv, g, beta)
    x, of_q, of_k = _heads(qkv, g, beta, doc_start, cache_len, key_heads, key_dim, compute)
    grad = up(dy, compute).transpose(0, 2, 1, 3)
    made = [np.empty(array.shape, compute) for array in (x.q, x.k, x.v, x.g, x.beta)]
    to_state = np.zeros(states.shape[1:], compute)
    for c, state in _chunks_back(x, up(states, compute)):
        part = slice(c.decays.at, c.decays.end)
        *found, to_state = _chunk_grads(x, c, grad[:, :, part], state, to_state)
        for whole, of_chunk in zip(made, found):
            whole[:, :, part] = of_chunk
    dq, dk, dv, dg, dbeta = made
    batch, tokens, heads = g.shape

    def of_channels(dx: np.ndarray, unit: np.ndarray, inverse: np.ndarray) -> np.ndarray:
        """Return the gradient of q or k before normalization, summed over the heads that share it."""
        raw = inverse * (dx - unit * np.sum(unit * dx, axis=-1, keepdims=True))
        shared = raw.transpose(0, 2, 1, 3).reshape(batch, tokens, key_heads, heads // key_heads, key_dim)
        summed: np.ndarray = shared.sum(axis=3).reshape(batch, tokens, -1)
        return summed

    scale = compute.type(key_dim**-0.5)
    parts = of_channels(dq * scale, x.q / scale, of_q), of_channels(dk, x.k, of_k), dv.transpose(0, 2, 1, 3)
    dqkv = np.concatenate([part.reshape(batch, tokens, -1) for part in parts], axis=-1)
    of_g, of_beta = (finish(x.transpose(0, 2, 1), np.float32, compute) for x in (dg, dbeta))
    return finish(dqkv, qkv.dtype, compute), of_g, of_beta


def _chunks_back(x: _Heads, states: np.ndarray) -> Iterator[tuple[_Chunk, np.ndarray]]:
    """Yield the chunks in reverse order, each with its incoming state."""
    segment = delta_segment(x.g.shape[0] * x.g.shape[1])
    for number, state in reversed(list(enumerate(states))):
        first = number * segment
        found = []
        for at in range(first, min(first + segment, x.g.shape[2]), DELTA_CHUNK):
            c = _chunk(x, at)
            found.append((c, state))
            state = _next(x, c, state, _corrections(x, c, state))
        yield from reversed(found)


def _chunk_grads(
    x: _Heads, c: _Chunk, dy: np.ndarray, state: np.ndarray, to_next: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return the gradients of q, k, v, g and beta of a chunk, and of its incoming state.

    to_next: the gradient of the state after the chunk.
    """
    d = c.decays
    part = slice(d.at, d.end)
    q, k, v, beta = x.q[:, :, part], x.k[:, :, part], x.v[:, :, part], x.beta[:, :, part, None]
    inside, to_end = d.inside[..., None], d.to_end[..., None]
    new = _corrections(x, c, state)

    def t(array: np.ndarray) -> np.ndarray:
        return array.swapaxes(-1, -2)

    to_new = t(c.scores) @ dy + (k * to_end) @ to_next
    to_rhs = np.linalg.solve(t(np.eye(d.end - d.at, dtype=beta.dtype) + beta * c.system), to_new)
    to_wanted = beta * to_rhs
    by_state, by_wanted, by_next = dy @ t(state), to_wanted @ t(state), new @ t(to_next)
    scores, system = dy @ t(new), np.tril(-(to_rhs @ t(new)), -1)
    dscores, dsystem = scores * d.decay, beta * system * d.decay
    dq = inside * by_state + dscores @ k
    dk = to_end * by_next - inside * by_wanted + (dsystem + t(dsystem)) @ k + t(dscores) @ q
    read = inside * (k @ state)
    dbeta = np.sum(to_rhs * (v - read), axis=-1) + np.sum(system * c.system, axis=-1)
    ends, through = np.sum(to_end * k * by_next, axis=-1), d.whole * np.sum(to_next * state, axis=(-1, -2))
    of_state = np.sum(inside * (q * by_state - k * by_wanted), axis=-1)
    dg = gate_gradient(scores * c.scores + beta * system * c.system, of_state, ends, through)
    whole = d.whole[..., None, None] * to_next + t(q * inside) @ dy - t(k * inside) @ to_wanted
    return dq, dk, to_wanted, dg, dbeta, whole
