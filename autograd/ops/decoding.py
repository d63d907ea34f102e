"""Decoding: appending to the cache of keys and values, and drawing tokens from logits. No gradients."""

from __future__ import annotations

import numpy as np

from wgrad.autograd.args import Args
from wgrad.autograd.operators import operator
from wgrad.device.contract import Array


@operator
def kv_append(args: Args, cache: Array, new: Array, cache_len: Array) -> None:
    """Write new [B, T, G, D] to cache[:, cache_len[0] : cache_len[0] + T] of cache [B, S, G, D], in place. Tokens that
    would lie past S are left out."""
    args.array("cache", cache, "B S G D").array("new", new, "B T G D")
    fits_cache(args, "new", args.size["T"], cache_len)
    cache_dtype(args, "cache", cache, "new", new)


def fits_cache(args: Args, name: str, tokens: int, cache_len: Array) -> None:
    """Check that the `tokens` in the array `name` are no more than the cache holds, args.size["S"]."""
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
    """Write new [B, T, G, D] into cache [B, S, G, D] from token `first` on; tokens past S are left out."""
    fits = new[:, : max(0, cache.shape[1] - first)]
    cache[:, first : first + fits.shape[1]] = fits


@operator
def sample(args: Args, logits: Array, uniform: Array, settings: Array) -> None:
    """logits float32 [B, V] or [V], uniform float32 [B] or [1] in [0, 1), settings float32 [B, 4] or [1, 4], rows of
    `sample_settings` -> ids int32 of uniform's shape, -1 for a row with a logit that is not finite. Order as in
    transformers: temperature, top-k, top-p, min-p; a value tied with the k-th is kept; then inverse of the cumulative
    distribution in id order."""
    rows = len(getattr(logits, "shape", ())) == 2
    args.array("logits", logits, "B V" if rows else "V", "f32", "rows of logits, or one")
    args.array("uniform", uniform, "B" if rows else "1", "f32", "a number for each row of logits")
    args.array("settings", settings, "B 4" if rows else "1 4", "f32", "make it with sample_settings")


@sample.reference
def _(logits: np.ndarray, uniform: np.ndarray, settings: np.ndarray) -> np.ndarray:
    rows = zip(logits.reshape(uniform.size, -1), uniform.tolist(), settings.tolist())
    return np.array([_draw(row, number, t, int(k), p, least) for row, number, (t, k, p, least) in rows], np.int32)


_MOST_TOP_K = 1 << 24  # float32 has every integer up to it, and no vocabulary has as many tokens
_MOST_TEMPERATURE = 1e35  # all tokens weigh the same long before it


def sample_settings(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """Return a row of the settings of `sample`: float32 [4].

    temperature: 0 is greedy, the lowest id on a tie. top_k, top_p, min_p: off at 0, 1 and 0.
    """
    args = Args("sample")
    args.rule(temperature >= 0, f"temperature must be 0 (greedy) or positive, got {temperature}")
    args.rule(top_k >= 0, f"top_k must be 0 (off) or positive, got {top_k}")
    args.rule(0 < top_p <= 1, f"top_p must be in (0, 1], got {top_p}; 1 is off")
    args.rule(0 <= min_p <= 1, f"min_p must be in [0, 1], got {min_p}; 0 is off")
    return np.array([min(temperature, _MOST_TEMPERATURE), min(top_k, _MOST_TOP_K), top_p, min_p], np.float32)


def _draw(logits: np.ndarray, number: float, temperature: float, top_k: int, top_p: float, min_p: float) -> int:
    """Draw a token from one row of logits, or return -1 if one is not finite.

    top-p keeps a token if the tokens strictly more probable than it sum to less than top_p: tokens of equal
    probability are kept or dropped together, and the most probable are always kept.
    """
    if not np.isfinite(logits).all():
        return -1
    if temperature == 0:
        return int(np.argmax(logits))
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
    if min_p > 0:
        kept &= scaled >= scaled.max() + np.log(min_p)
    p = np.where(kept, p, 0.0)
    cumulative = np.cumsum(p)
    index = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
    return min(index, int(np.flatnonzero(p)[-1]))


@operator
def advance(
    args: Args,
    drawn: Array,
    uniforms: Array,
    tokens: Array,
    step: Array,
    ids: Array,
    positions: Array,
    cache_len: Array,
    uniform: Array,
) -> None:
    """End a decoding step of B texts, in place: tokens[step] = drawn, ids = drawn (0 for -1), positions += 1,
    cache_len += 1, step += 1, uniform = uniforms[step]. The next step then needs nothing from the host.

    drawn, ids, positions int32 [B], uniform float32 [B]; tokens int32, uniforms float32 [P, B]; cache_len, step int32
    [1]. From step P on tokens and uniform stay as they are."""
    for name, value in (("drawn", drawn), ("ids", ids), ("positions", positions)):
        args.array(name, value, "B", "i32")
    args.array("uniform", uniform, "B", "f32").array("uniforms", uniforms, "P B", "f32")
    args.array("tokens", tokens, "P B", "i32").array("step", step, "1", "i32").array("cache_len", cache_len, "1", "i32")


@advance.reference
def _(
    drawn: np.ndarray,
    uniforms: np.ndarray,
    tokens: np.ndarray,
    step: np.ndarray,
    ids: np.ndarray,
    positions: np.ndarray,
    cache_len: np.ndarray,
    uniform: np.ndarray,
) -> None:
    now, steps = int(step[0]), len(tokens)
    if now < steps:
        tokens[now] = drawn
    ids[:] = np.maximum(drawn, 0)
    for counter in (positions, cache_len, step):
        counter += 1
    if now + 1 < steps:
        uniform[:] = uniforms[now + 1]
