"""Reference attention: blocks of query rows, exact softmax inside a block; T x S scores never stand whole.

Source: Dao et al., FlashAttention (2022): the forward saves lse, the backward makes the probabilities again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from wgrad.autograd.reference_base import compute_dtype, finish, operator, up
from wgrad.autograd.reference_norm import rotate

# Scores of one block of queries, all heads: at most this many elements (a single row is always taken).
BLOCK_ELEMENTS = 1 << 21
MASKED = -1e30  # finite, as on the devices: exp(MASKED - lse) is 0


class ReferenceAttention:
    @operator
    def attention(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        doc_start: np.ndarray,
        cache_len: np.ndarray,
        *,
        scale: float,
        window: int = 0,
    ) -> tuple[np.ndarray, np.ndarray]:
        compute = compute_dtype(q, k, v)
        batch, length, heads, width = q.shape
        o = np.empty(q.shape, compute)
        lse = np.empty((batch, heads, length), compute)
        for b, rows, keys, seen in _blocks(doc_start, int(cache_len[0]), k.shape[1], heads, window):
            scores = _scores(q[b, rows], k[b, keys], seen, scale, compute)  # [G, H / G, t, s]
            top = scores.max(axis=-1, keepdims=True)
            p = np.exp(scores - top)
            total = p.sum(axis=-1, keepdims=True)
            values = up(v[b, keys], compute).transpose(1, 0, 2)[:, None]  # [G, 1, s, D]
            o[b, rows] = ((p @ values) / total).reshape(heads, -1, width).transpose(1, 0, 2)
            lse[b, :, rows] = (top + np.log(total)).reshape(heads, -1)
        return finish(o, q.dtype, compute), lse

    @operator
    def attention_backward(
        self,
        do: np.ndarray,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        o: np.ndarray,
        lse: np.ndarray,
        doc_start: np.ndarray,
        *,
        scale: float,
        window: int = 0,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        compute = compute_dtype(do, q, k, v, o, lse)
        heads, width, groups = q.shape[2], q.shape[3], k.shape[2]
        dq, dk, dv = np.empty(q.shape, compute), np.zeros(k.shape, compute), np.zeros(v.shape, compute)
        delta = np.sum(up(do, compute) * up(o, compute), axis=-1)  # [B, T, H]
        for b, rows, keys, seen in _blocks(doc_start, 0, k.shape[1], heads, window):
            p = _scores(q[b, rows], k[b, keys], seen, scale, compute)
            p = np.exp(p - up(lse[b, :, rows], compute).reshape(groups, -1, p.shape[2], 1))
            grad = _by_group(up(do[b, rows], compute), groups)  # [G, H / G, t, D]
            ds = grad @ up(v[b, keys], compute).transpose(1, 2, 0)[:, None]
            ds = (ds - _by_group(delta[b, rows][..., None], groups)) * p * compute.type(scale)
            dq[b, rows] = (
                (ds @ up(k[b, keys], compute).transpose(1, 0, 2)[:, None]).reshape(heads, -1, width).transpose(1, 0, 2)
            )
            dk[b, keys] += _sum_heads(ds, _by_group(up(q[b, rows], compute), groups))
            dv[b, keys] += _sum_heads(p, grad)
        return finish(dq, q.dtype, compute), finish(dk, k.dtype, compute), finish(dv, v.dtype, compute)

    @operator
    def kv_append(self, cache: np.ndarray, new: np.ndarray, cache_len: np.ndarray) -> None:
        _append(cache, new, int(cache_len[0]))

    @operator
    def rope_append(
        self,
        k: np.ndarray,
        v: np.ndarray,
        cos: np.ndarray,
        sin: np.ndarray,
        positions: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        cache_len: np.ndarray,
    ) -> None:
        for cache, new in ((keys, rotate(k, cos, sin, positions)), (values, v)):
            _append(cache, new.reshape(cache.shape[0], -1, *cache.shape[2:]), int(cache_len[0]))


def _append(cache: np.ndarray, new: np.ndarray, first: int) -> None:
    """cache [B, S, G, D] from `first` on = new [B, T, G, D]; what lies past S is left out."""
    fits = new[:, : max(0, cache.shape[1] - first)]
    cache[:, first : first + fits.shape[1]] = fits


def _blocks(
    doc_start: np.ndarray, cache_len: int, num_keys: int, heads: int, window: int
) -> Iterator[tuple[int, slice, slice, np.ndarray]]:
    """Batch index, query rows, key rows and the mask [t, s] of every block of queries."""
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


def _scores(q: np.ndarray, k: np.ndarray, seen: np.ndarray, scale: float, compute: np.dtype) -> np.ndarray:
    """scale * q k^T, masked: q [t, H, D], k [s, G, D] -> [G, H / G, t, s]."""
    scores = _by_group(up(q, compute), k.shape[1]) @ up(k, compute).transpose(1, 2, 0)[:, None]
    scores *= compute.type(scale)
    return np.where(seen, scores, compute.type(MASKED))


def _sum_heads(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """sum over the heads of a group of weights^T x: [G, h, t, s], [G, h, t, D] -> [s, G, D]."""
    groups, h, t, s = weights.shape
    return (weights.reshape(groups, h * t, s).swapaxes(1, 2) @ x.reshape(groups, h * t, -1)).transpose(1, 0, 2)
