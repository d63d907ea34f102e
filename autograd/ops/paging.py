"""A paged cache of keys and values: each sequence of a batch has a list of pages, in any order, from a shared pool.

A token's place is its index in its sequence: place i of row b is in page pages[b, i // PAGE]. A sequence takes memory
only for the tokens it has, and sequences with a common beginning can share pages. No gradient.
Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention (2023).
"""

from __future__ import annotations

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.operators import operator
from wgrad.autograd.ops.attention import attention_in_numpy, check_heads
from wgrad.autograd.ops.decoding import cache_dtype
from wgrad.autograd.ops.rope import rotary_tables, rotate
from wgrad.device.contract import PAGE, Array


@operator
def paged_append(
    args: Args,
    keys: Array,
    values: Array,
    k: Array,
    v: Array,
    pages: Array,
    places: Array,
    cos: Array | None = None,
    sin: Array | None = None,
    *,
    interleaved: bool = False,
) -> None:
    """Write token n of k, v [B T, G, D] to place places[n] of row n // T, in place in keys, values [M, PAGE, G, D].

    pages int32 [B, W], places int32 [B T]. A token whose place is negative or beyond the row's pages is left out. With
    cos and sin, float32 [P, J] as in `rope`, k is rotated first, each token by its place, which must be below P."""
    args.array("keys", keys, f"M {PAGE} G D", "float").array("values", values, f"M {PAGE} G D")
    args.array("k", k, "N G D").array("v", v, "N G D").array("pages", pages, "B W", "i32")
    args.array("places", places, "N", "i32", "one for each new token")
    n, batch = args.size["N"], args.size["B"]
    args.rule(n % batch == 0, f"k must have as many tokens for each of the {batch} rows of pages, got N = {n}")
    args.rule(args.size["D"] % 2 == 0, f"k must have an even head width D, got {args.size['D']}")
    for name, array in (("values", values), ("k", k), ("v", v)):
        cache_dtype(args, "keys", keys, name, array)
    args.rule((cos is None) == (sin is None), "cos and sin must both be given, or neither")
    if cos is not None and sin is not None:
        rotary_tables(args, "k", cos, sin)


@paged_append.reference
def _(
    keys: np.ndarray,
    values: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    pages: np.ndarray,
    places: np.ndarray,
    cos: np.ndarray | None,
    sin: np.ndarray | None,
    interleaved: bool,
) -> None:
    kept = (places >= 0) & (places < pages.shape[1] * PAGE)
    rows, at = np.flatnonzero(kept) // (len(places) // len(pages)), places[kept]
    k, v = k[kept], v[kept]
    if cos is not None and sin is not None:
        k = rotate(k, cos, sin, at, False, interleaved)
    for pool, new in ((keys, k), (values, v)):
        pool[pages[rows, at // PAGE], at % PAGE] = new


@operator
def paged_attention(
    args: Args,
    q: Array,
    keys: Array,
    values: Array,
    pages: Array,
    places: Array,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """`attention` of one query per row, q [B, 1, H, D], on the row's keys and values in pages [M, PAGE, G, D] -> o
    [B, 1, H, D] (q's dtype), lse float32 [B, H, 1]. pages int32 [B, W]; places int32 [B], from 0: the query of row b
    sees the places up to places[b], or with window > 0 the last `window` of these."""
    args.array("q", q, "B 1 H D", "float", "one query for each row")
    args.array("keys", keys, f"M {PAGE} G D").array("values", values, f"M {PAGE} G D")
    args.array("pages", pages, "B W", "i32").array("places", places, "B", "i32")
    check_heads(args, window, softcap)
    for name, array in (("values", values), ("q", q)):
        cache_dtype(args, "keys", keys, name, array)


@paged_attention.reference
def _(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    pages: np.ndarray,
    places: np.ndarray,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[np.ndarray, np.ndarray]:
    parts = []
    for b, place in enumerate(places.tolist()):
        own = pages[b, : place // PAGE + 1]
        k, v = (pool[own].reshape(1, -1, *pool.shape[2:]) for pool in (keys, values))
        at = np.array([min(place, k.shape[1] - 1)], np.int32)
        parts.append(attention_in_numpy(q[b : b + 1], k, v, np.zeros((1, 1), np.int32), at, scale, window, softcap))
    o, lse = (np.concatenate(part) for part in zip(*parts))
    return o, lse
