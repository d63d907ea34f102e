"""Decoding: the cache of keys and values grows, and a token is drawn from its logits. No gradient."""

from __future__ import annotations

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.operators import operator
from wgrad.device.contract import Array


@operator
def kv_append(args: Args, cache: Array, new: Array, cache_len: Array) -> None:
    """cache [B, S, G, D] in place: cache[:, cache_len[0] : cache_len[0] + T] = new [B, T, G, D]. A token that would
    lie past S is left out."""
    args.array("cache", cache, "B S G D").array("new", new, "B T G D")
    fits_cache(args, "new", args.size["T"], cache_len)
    cache_dtype(args, "cache", cache, "new", new)


def fits_cache(args: Args, name: str, tokens: int, cache_len: Array) -> None:
    """`tokens` more, in the array `name`, must have room in the cache of args.size["S"]."""
    args.array("cache_len", cache_len, "1", "i32")
    keys = args.size["S"]
    args.rule(tokens <= keys, f"{name} must fit into the cache of {keys} tokens, got {tokens}; make a longer cache")


def check_room(op: str, cache: Array, tokens: int, cache_len: Array) -> None:
    """Refuse tokens that would lie past the end of a cache [B, S, G, D], where the host can look at cache_len."""
    if isinstance(cache_len, np.ndarray):
        first, keys = int(cache_len[0]), int(cache.shape[1])
        Args(op).rule(
            0 <= first <= keys - tokens,
            f"cache_len must leave room for {tokens} more tokens in the cache of {keys}, got {first}; "
            "make a longer cache",
        )


def cache_dtype(args: Args, cache_name: str, cache: Array, name: str, new: Array) -> None:
    wanted = f"the cache's dtype {cache.dtype}" if cache_name == "cache" else f"the dtype of {cache_name} {cache.dtype}"
    args.rule(cache.dtype == new.dtype, f"{name} must have {wanted}, got {new.dtype}; cast it")


@kv_append.reference
def _(cache: np.ndarray, new: np.ndarray, cache_len: np.ndarray) -> None:
    append(cache, new, int(cache_len[0]))


def append(cache: np.ndarray, new: np.ndarray, first: int) -> None:
    """cache [B, S, G, D] from `first` on = new [B, T, G, D]; what lies past S is left out."""
    fits = new[:, : max(0, cache.shape[1] - first)]
    cache[:, first : first + fits.shape[1]] = fits


@operator
def sample(
    args: Args, logits: Array, uniform: Array, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> None:
    """logits float32 [V], uniform float32 [1] in [0, 1) -> id int32 [1]. temperature 0 is greedy (lowest id on a
    tie). top_k 0 and top_p 1 are off. Order as in transformers: temperature, top-k, top-p; a value tied with the
    k-th is kept; then inverse of the cumulative distribution in id order."""
    args.array("logits", logits, "V", "f32", "one row of logits").array("uniform", uniform, "1", "f32")
    args.rule(temperature >= 0, f"temperature must be 0 (greedy) or positive, got {temperature}")
    args.rule(top_k >= 0, f"top_k must be 0 (off) or positive, got {top_k}")
    args.rule(0 < top_p <= 1, f"top_p must be in (0, 1], got {top_p}; 1 is off")


@sample.reference
def _(logits: np.ndarray, uniform: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """top-p keeps a token when all tokens strictly more probable than it weigh less than top_p together, so that
    tokens of equal probability stay or go together; the most probable always stay."""
    if temperature == 0:
        return np.array([np.argmax(logits)], np.int32)
    scaled = logits.astype(np.float64) / temperature
    kept = np.ones(scaled.size, bool)
    if 0 < top_k < scaled.size:
        kept &= scaled >= np.partition(scaled, -top_k)[-top_k]
    p = np.where(kept, np.exp(scaled - scaled.max()), 0.0)
    p /= p.sum()
    if top_p < 1:
        falling = np.sort(p)[::-1]
        before = np.concatenate([[0.0], np.cumsum(falling)])
        heavier = before[np.searchsorted(-falling, -p, side="left")]  # weight of all strictly more probable tokens
        kept &= (heavier < top_p) | (heavier == 0)
        p = np.where(kept, p, 0.0)
    cumulative = np.cumsum(p)
    index = int(np.searchsorted(cumulative, float(uniform[0]) * cumulative[-1], side="right"))
    return np.array([min(index, int(np.flatnonzero(p)[-1]))], np.int32)
