"""The recurrence of Mamba-2: each head has a state of fixed size, which decays and to which each token adds.

Each head keeps a state S [N, P]. B and C belong to groups of heads, as keys and queries do in grouped attention:

    S = exp(g) S + B (dt x)';  y = S' C + skip x

Over a chunk of tokens this is matmuls alone (state space duality); only the chunks are sequential. It is the gated
delta rule (delta_rule.py) without the corrections and the normalization.

Source: Dao and Gu, Transformers are SSMs (arXiv 2405.21060).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.checkpoint import once
from wgrad.autograd.function import Context, Weight, differentiable
from wgrad.autograd.operators import operator
from wgrad.autograd.ops.decays import Decays, gate_gradient
from wgrad.autograd.precision import compute_dtype, finish, up
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import DELTA_CHUNK, MAX_KEY_DIM, Array, delta_segment


@differentiable
def ssd(
    ctx: Context,
    xbc: Tensor,
    g: Tensor,
    dt: Tensor,
    skip: Weight,
    doc_start: Array,
    cache_len: Array,
    *,
    groups: int,
    state_dim: int,
    state: Array | None = None,
) -> Tensor:
    """xbc [B, T, H P + 2 G N], x of H heads, then B and C of G groups; g (at most 0) and dt float32 [B, T, H], skip
    float32 [H] -> [B, T, H, P]. doc_start int32 [B, T] and cache_len [1] as in `attention`. state float32 [B, H, N, P]
    as in `delta_rule`."""
    options = {"groups": groups, "state_dim": state_dim}
    y, states = once(lambda: ctx.device.ssd(xbc, g, dt, skip, doc_start, cache_len, **options, state=state))
    ctx.save(xbc, g, dt, skip, doc_start, cache_len, states)
    ctx.options = options
    out: Tensor = y
    return out


@ssd.backward
def _(ctx: Context, dy: Array) -> Any:
    return ctx.device.ssd_backward(dy, *ctx.saved, **ctx.options, need_dskip=ctx.needs_grad[3])


@ssd.operator
def _(
    args: Args,
    xbc: Array,
    g: Array,
    dt: Array,
    skip: Array,
    doc_start: Array,
    cache_len: Array,
    *,
    groups: int,
    state_dim: int,
    state: Array | None = None,
) -> None:
    """-> y [B, T, H, P] of xbc's dtype, and for the backward the states float32 [S, B, H, N, P] before every segment of
    `delta_segment` tokens; None where a state is given."""
    _check(args, xbc, g, dt, skip, doc_start, cache_len, groups, state_dim)
    if state is not None:
        args.array("state", state, "B H N P", "f32")


def _check(
    args: Args,
    xbc: Array,
    g: Array,
    dt: Array,
    skip: Array,
    doc_start: Array,
    cache_len: Array,
    groups: int,
    state_dim: int,
) -> None:
    args.array("xbc", xbc, "B T E").array("g", g, "B T H", "f32").array("dt", dt, "B T H", "f32")
    args.array("skip", skip, "H", "f32")
    args.array("doc_start", doc_start, "B T", "i32").array("cache_len", cache_len, "1", "i32")
    heads, channels = args.size["H"], args.size["E"]
    values = channels - 2 * groups * state_dim
    args.rule(
        0 < groups <= heads and heads % groups == 0,
        f"the heads of g must be a multiple of groups, got {heads} and {groups}",
    )
    args.rule(
        0 < state_dim <= MAX_KEY_DIM and values > 0 and values % heads == 0,
        f"xbc must have as many channels of each of {heads} heads, then 2 * {groups} * {state_dim} of B and C "
        f"(state_dim at most {MAX_KEY_DIM}), got {channels}",
    )
    args.size |= {"N": state_dim, "P": values // heads}


@dataclass
class _Heads:
    """x, b and c [B, H, T, width] (b and c repeated for the heads of a group); g and dt [B, H, T]; starts [B, T],
    counted from the first of these tokens."""

    x: np.ndarray
    b: np.ndarray
    c: np.ndarray
    g: np.ndarray
    dt: np.ndarray
    starts: np.ndarray


def _heads(
    xbc: np.ndarray, g: np.ndarray, dt: np.ndarray, doc_start: np.ndarray, cache_len: np.ndarray,
    groups: int, state_dim: int, compute: np.dtype,
) -> _Heads:  # fmt: skip
    (batch, tokens, heads), shared = g.shape, groups * state_dim
    wide = up(xbc, compute)
    x, b, c = np.split(wide, (wide.shape[2] - 2 * shared, wide.shape[2] - shared), axis=2)
    b, c = (np.repeat(y.reshape(batch, tokens, groups, state_dim), heads // groups, axis=2) for y in (b, c))
    x, b, c = (y.transpose(0, 2, 1, 3) for y in (x.reshape(batch, tokens, heads, -1), b, c))
    decays, steps = (up(y, compute).transpose(0, 2, 1) for y in (g, dt))
    return _Heads(x, b, c, decays, steps, doc_start - cache_len[0])


def _next(h: _Heads, d: Decays, state: np.ndarray) -> np.ndarray:
    """Return the state after a chunk."""
    part = slice(d.at, d.end)
    kept = (h.b[:, :, part] * d.to_end[..., None]).swapaxes(-1, -2)
    after: np.ndarray = d.whole[..., None, None] * state + kept @ (h.dt[:, :, part, None] * h.x[:, :, part])
    return after


@ssd.reference
def _(
    xbc: np.ndarray, g: np.ndarray, dt: np.ndarray, skip: np.ndarray, doc_start: np.ndarray, cache_len: np.ndarray,
    groups: int, state_dim: int, state: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray | None]:  # fmt: skip
    compute = compute_dtype(xbc, g, dt, skip, state)
    h = _heads(xbc, g, dt, doc_start, cache_len, groups, state_dim, compute)
    batch, heads, tokens, width = h.x.shape
    now = np.zeros((batch, heads, state_dim, width), compute) if state is None else up(state, compute)
    y, states, segment = up(skip, compute)[:, None, None] * h.x, [], delta_segment(batch * heads)
    for at in range(0, tokens, DELTA_CHUNK):
        if at % segment == 0:
            states.append(now)
        d = Decays.of(h.g, h.starts, at)
        part = slice(at, d.end)
        scores = h.c[:, :, part] @ h.b[:, :, part].swapaxes(-1, -2) * d.decay
        y[:, :, part] += d.inside[..., None] * (h.c[:, :, part] @ now)
        y[:, :, part] += scores @ (h.dt[:, :, part, None] * h.x[:, :, part])
        now = _next(h, d, now)
    if state is not None:
        state[...] = now
    result = finish(y.transpose(0, 2, 1, 3), xbc.dtype, compute)
    return result, finish(np.stack(states), np.float32, compute) if state is None else None


@operator
def ssd_backward(
    args: Args,
    dy: Array,
    xbc: Array,
    g: Array,
    dt: Array,
    skip: Array,
    doc_start: Array,
    cache_len: Array,
    states: Array,
    *,
    groups: int,
    state_dim: int,
    need_dskip: bool = True,
) -> None:
    """-> dxbc of xbc's dtype, dg and ddt float32 [B, T, H], dskip float32 [H] or None. The states within a segment are
    recomputed from those that the forward returned."""
    _check(args, xbc, g, dt, skip, doc_start, cache_len, groups, state_dim)
    args.array("dy", dy, "B T H P").array("states", states, "S B H N P", "f32")


@ssd_backward.reference
def _(
    dy: np.ndarray, xbc: np.ndarray, g: np.ndarray, dt: np.ndarray, skip: np.ndarray, doc_start: np.ndarray,
    cache_len: np.ndarray, states: np.ndarray, groups: int, state_dim: int, need_dskip: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:  # fmt: skip
    compute = compute_dtype(dy, xbc, g, dt, skip)
    h = _heads(xbc, g, dt, doc_start, cache_len, groups, state_dim, compute)
    grad = up(dy, compute).transpose(0, 2, 1, 3)
    made = [np.empty(array.shape, compute) for array in (h.x, h.b, h.c, h.g, h.dt)]
    to_state = np.zeros(states.shape[1:], compute)
    for d, state in _chunks_back(h, up(states, compute)):
        *found, to_state = _chunk_grads(h, d, grad[:, :, d.at : d.end], state, to_state)
        for whole, of_chunk in zip(made, found):
            whole[:, :, d.at : d.end] = of_chunk
    dx, db, dc, dg, ddt = made
    dx += up(skip, compute)[:, None, None] * grad
    batch, tokens, heads = g.shape
    parts = [dx.transpose(0, 2, 1, 3).reshape(batch, tokens, -1)]
    for of_heads in (db, dc):
        shared = of_heads.transpose(0, 2, 1, 3).reshape(batch, tokens, groups, heads // groups, state_dim)
        parts.append(shared.sum(axis=3).reshape(batch, tokens, -1))
    of_g, of_dt = (finish(y.transpose(0, 2, 1), np.float32, compute) for y in (dg, ddt))
    dskip = finish(np.sum(grad * h.x, axis=(0, 2, 3)), np.float32, compute) if need_dskip else None
    return finish(np.concatenate(parts, axis=-1), xbc.dtype, compute), of_g, of_dt, dskip


def _chunks_back(h: _Heads, states: np.ndarray) -> Iterator[tuple[Decays, np.ndarray]]:
    """Yield the chunks in reverse order, each with its incoming state."""
    segment = delta_segment(h.g.shape[0] * h.g.shape[1])
    for number, state in reversed(list(enumerate(states))):
        first = number * segment
        found = []
        for at in range(first, min(first + segment, h.g.shape[2]), DELTA_CHUNK):
            d = Decays.of(h.g, h.starts, at)
            found.append((d, state))
            state = _next(h, d, state)
        yield from reversed(found)


def _chunk_grads(
    h: _Heads, d: Decays, dy: np.ndarray, state: np.ndarray, to_next: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return the gradients of x (without the part through skip), b, c, g and dt of a chunk, and of its incoming state.

    to_next: the gradient of the state after the chunk.
    """
    part = slice(d.at, d.end)
    x, b, c, dt = h.x[:, :, part], h.b[:, :, part], h.c[:, :, part], h.dt[:, :, part, None]
    inside, to_end, added = d.inside[..., None], d.to_end[..., None], dt * x

    def t(array: np.ndarray) -> np.ndarray:
        return array.swapaxes(-1, -2)

    scores = c @ t(b) * d.decay
    to_added = t(scores) @ dy + (b * to_end) @ to_next
    by_scores, by_state, by_next = dy @ t(added), dy @ t(state), added @ t(to_next)
    dscores = by_scores * d.decay
    dc = inside * by_state + dscores @ b
    db = to_end * by_next + t(dscores) @ c
    ends, through = np.sum(to_end * b * by_next, axis=-1), d.whole * np.sum(to_next * state, axis=(-1, -2))
    dg = gate_gradient(by_scores * scores, np.sum(inside * c * by_state, axis=-1), ends, through)
    whole = d.whole[..., None, None] * to_next + t(c * inside) @ dy
    return dt * to_added, db, dc, dg, np.sum(to_added * x, axis=-1), whole
