"""The recurrence of Mamba-1: each channel has a few states, which decay and to which each token adds.

Each channel c keeps a state h of N numbers. B and C are common to all channels:

    dt = softplus(raw + bias);  h = exp(-exp(A_log) dt) h + dt x B;  y = C' h + skip x

Source: Gu and Dao, Mamba (arXiv 2312.00752).
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
from wgrad.autograd.ops.activation import sigmoid
from wgrad.autograd.precision import compute_dtype, finish, up
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import MAX_SCAN_STATES, SCAN_CHUNK, Array


@differentiable
def selective_scan(
    ctx: Context,
    x: Tensor,
    dt: Tensor,
    bc: Tensor,
    weight: Weight,
    doc_start: Array,
    cache_len: Array,
    *,
    state: Array | None = None,
) -> Tensor:
    """x and dt (before its bias and softplus) [B, T, C], bc [B, T, 2 N], B and then C; weight float32 [C, N + 2]: for
    each channel N numbers of A_log, skip, and the bias of dt -> [B, T, C]. doc_start int32 [B, T] and cache_len [1] as
    in `attention`. state float32 [B, C, N]: the state before these tokens, overwritten with the one after them; there
    is no backward with it."""
    y, states = once(lambda: ctx.device.selective_scan(x, dt, bc, weight, doc_start, cache_len, state=state))
    ctx.save(x, dt, bc, weight, doc_start, cache_len, states)
    out: Tensor = y
    return out


@selective_scan.backward
def _(ctx: Context, dy: Array) -> Any:
    return ctx.device.selective_scan_backward(dy, *ctx.saved, need_dweight=ctx.needs_grad[3])


@selective_scan.operator
def _(
    args: Args,
    x: Array,
    dt: Array,
    bc: Array,
    weight: Array,
    doc_start: Array,
    cache_len: Array,
    *,
    state: Array | None = None,
) -> None:
    """-> y [B, T, C] of x's dtype, and for the backward the states float32 [S, B, C, N] before every SCAN_CHUNK tokens;
    None where a state is given."""
    _check(args, x, dt, bc, weight, doc_start, cache_len)
    if state is not None:
        args.array("state", state, "B C N", "f32")


def _check(args: Args, x: Array, dt: Array, bc: Array, weight: Array, doc_start: Array, cache_len: Array) -> None:
    args.array("x", x, "B T C").array("dt", dt, "B T C").array("bc", bc, "B T E").array("weight", weight, "C W", "f32")
    args.array("doc_start", doc_start, "B T", "i32").array("cache_len", cache_len, "1", "i32")
    numbers, both = args.size["W"] - 2, args.size["E"]
    args.rule(
        0 < numbers <= MAX_SCAN_STATES and both == 2 * numbers,
        f"weight must have N + 2 columns for 2 N in bc, N from 1 to {MAX_SCAN_STATES}; got {numbers + 2} and {both}",
    )
    types = {np.dtype(array.dtype).name for array in (x, dt, bc)}
    args.rule(len(types) == 1, f"x, dt and bc must have one dtype, got {', '.join(sorted(types))}; cast them to x's")
    args.size["N"] = numbers


@dataclass
class _Tokens:
    """Inputs in the compute dtype.

    x, raw (dt with its bias), dt [B, T, C]; b, c [B, T, N]; rate [C, N]; skip [C]; kept, added [B, T, 1, 1]: whether a
    token keeps the state before it, and whether it adds to it.
    """

    x: np.ndarray
    raw: np.ndarray
    dt: np.ndarray
    b: np.ndarray
    c: np.ndarray
    rate: np.ndarray
    skip: np.ndarray
    kept: np.ndarray
    added: np.ndarray

    def decay(self, t: int) -> np.ndarray:
        """Return the factors [B, C, N] of the state before a token."""
        return np.asarray(np.exp(self.rate * self.dt[:, t, :, None]) * self.kept[:, t])

    def next(self, t: int, state: np.ndarray) -> np.ndarray:
        """Return the state after a token."""
        added = (self.dt[:, t] * self.x[:, t])[..., None] * self.b[:, t, None] * self.added[:, t]
        return np.asarray(self.decay(t) * state + added)


def _tokens(
    x: np.ndarray, dt: np.ndarray, bc: np.ndarray, weight: np.ndarray, doc_start: np.ndarray, cache_len: np.ndarray,
    compute: np.dtype,
) -> _Tokens:  # fmt: skip
    wide, numbers = up(weight, compute), weight.shape[1] - 2
    raw = up(dt, compute) + wide[:, -1]
    position = cache_len[0] + np.arange(x.shape[1])
    kept, added = (found[..., None, None].astype(compute) for found in (doc_start < position, doc_start <= position))
    b, c = np.split(up(bc, compute), 2, axis=2)
    steps = np.logaddexp(raw, compute.type(0))
    rate = -np.exp(wide[:, :numbers])
    return _Tokens(up(x, compute), raw, steps, b, c, rate, wide[:, numbers], kept, added)


@selective_scan.reference
def _(
    x: np.ndarray, dt: np.ndarray, bc: np.ndarray, weight: np.ndarray, doc_start: np.ndarray, cache_len: np.ndarray,
    state: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray | None]:  # fmt: skip
    compute = compute_dtype(x, dt, bc, weight, state)
    h = _tokens(x, dt, bc, weight, doc_start, cache_len, compute)
    batch, tokens, channels = x.shape
    now = np.zeros((batch, channels, bc.shape[2] // 2), compute) if state is None else up(state, compute)
    y, states = h.skip * h.x, []
    for t in range(tokens):
        if t % SCAN_CHUNK == 0:
            states.append(now)
        now = h.next(t, now)
        y[:, t] += np.einsum("bcn,bn->bc", now, h.c[:, t])
    if state is not None:
        state[...] = now
    return finish(y, x.dtype, compute), finish(np.stack(states), np.float32, compute) if state is None else None


@operator
def selective_scan_backward(
    args: Args,
    dy: Array,
    x: Array,
    dt: Array,
    bc: Array,
    weight: Array,
    doc_start: Array,
    cache_len: Array,
    states: Array,
    *,
    need_dweight: bool = True,
) -> None:
    """-> dx, ddt and dbc of x's dtype, dweight float32 [C, N + 2] or None. The states within a chunk are recomputed
    from those that the forward returned."""
    _check(args, x, dt, bc, weight, doc_start, cache_len)
    args.array("dy", dy, "B T C").array("states", states, "S B C N", "f32")


@selective_scan_backward.reference
def _(
    dy: np.ndarray, x: np.ndarray, dt: np.ndarray, bc: np.ndarray, weight: np.ndarray, doc_start: np.ndarray,
    cache_len: np.ndarray, states: np.ndarray, need_dweight: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:  # fmt: skip
    compute = compute_dtype(dy, x, dt, bc, weight)
    h, grad = _tokens(x, dt, bc, weight, doc_start, cache_len, compute), up(dy, compute)
    dx, dsteps, db, dc = (np.zeros_like(array) for array in (h.x, h.x, h.b, h.c))
    to_state, drate = np.zeros(states.shape[1:], compute), np.zeros_like(h.rate)
    for t, before, after in _tokens_back(h, up(states, compute)):
        dc[:, t] = np.einsum("bcn,bc->bn", after, grad[:, t])
        to_state = to_state + h.c[:, t, None] * grad[:, t, :, None]
        decay, to_added = h.decay(t), to_state * h.added[:, t]
        db[:, t] = np.einsum("bcn,bc->bn", to_added, h.dt[:, t] * h.x[:, t])
        by_b = np.einsum("bcn,bn->bc", to_added, h.b[:, t])
        by_decay = to_state * decay * before
        dx[:, t] = h.dt[:, t] * by_b
        dsteps[:, t] = h.x[:, t] * by_b + np.sum(by_decay * h.rate, axis=-1)
        drate += np.einsum("bcn,bc->cn", by_decay, h.dt[:, t])
        to_state = decay * to_state
    ddt, parts = dsteps * sigmoid(h.raw), (np.sum(grad * h.x, axis=(0, 1)), np.zeros(x.shape[2], compute))
    dweight = np.column_stack([drate * h.rate, *parts])
    dweight[:, -1] = np.sum(ddt, axis=(0, 1))
    of_x, of_dt, of_bc = (finish(y, x.dtype, compute) for y in (dx + h.skip * grad, ddt, np.concatenate([db, dc], 2)))
    return of_x, of_dt, of_bc, finish(dweight, np.float32, compute) if need_dweight else None


def _tokens_back(h: _Tokens, states: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield the tokens in reverse order, each with the state before it and after it."""
    for number, state in reversed(list(enumerate(states))):
        first = number * SCAN_CHUNK
        after = [state]
        for t in range(first, min(first + SCAN_CHUNK, h.x.shape[1])):
            after.append(h.next(t, after[-1]))
        for t in reversed(range(len(after) - 1)):
            yield first + t, after[t], after[t + 1]
