"""float16's range in the forward on the tensor cores: keys far below the largest, where each counts little and all
together much. gfx90a's tensor cores take float16 subnormals for zeros."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

NAMES = ("q", "k", "v", "doc_start", "cache_len")
QUERIES, WIDTH = 5, 64


def with_a_sink(keys: int, above: float) -> dict[str, Any]:
    """Scores (scale 1) of about 0, and of `above` for the first key."""
    rng = np.random.default_rng(11)
    q, k, v = (rng.standard_normal((1, n, 1, WIDTH)) for n in (QUERIES, keys, keys))
    q, k = 0.25 * q, 0.25 * k
    q[..., 0], k[..., 0], k[:, 0], v[:, 1:] = 1, 0, 0, 1 + 0.1 * v[:, 1:]
    k[:, 0, :, 0] = above
    x = {"q": q, "k": k, "v": v}
    doc_start = np.zeros((1, QUERIES), np.int32)
    cache_len = np.array([keys - QUERIES], np.int32)
    return {n: a.astype(np.float16) for n, a in x.items()} | {"doc_start": doc_start, "cache_len": cache_len}


def attention(x: dict[str, Any], kind: Any) -> np.ndarray:
    """[QUERIES, WIDTH] in float64; of float16: probabilities and the result rounded to it, sums in float32."""
    sums: Any = np.float64 if kind is np.float64 else np.float32
    q, k, v = (x[n][0, :, 0].astype(sums) for n in ("q", "k", "v"))
    keys = len(k)
    scores = np.where(np.arange(keys) <= np.arange(keys - QUERIES, keys)[:, None], q @ k.T, -np.inf)
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    o = p.astype(kind).astype(sums) @ v / p.sum(axis=1, keepdims=True)
    return o.astype(kind).astype(np.float64)


def error(device: Any, keys: int, above: float) -> tuple[float, float]:
    """Largest differences from float64: the device's and a plain float16 implementation's."""
    x = with_a_sink(keys, above)
    arrays = {n: device.upload(a) for n, a in x.items()}
    o, lse = device.attention(*(arrays[n] for n in NAMES), scale=1.0)
    wanted = attention(x, np.float64)
    found = device.download(o).astype(np.float64)[0, :, 0]
    return float(np.abs(found - wanted).max()), float(np.abs(attention(x, np.float16) - wanted).max())


@pytest.mark.parametrize("above", [5, 10, 15, 20])
@pytest.mark.parametrize("architecture", ["gfx90a", "gfx942", "gfx1100"])
def test_many_small_probabilities_count(emulator: Any, architecture: str, above: int) -> None:
    ours, plain = error(emulator.device(architecture), 2048, above)
    assert ours <= 2 * plain


@pytest.mark.parametrize("above", [1.5, 2.5, 2.9999, 4.0, 7.5, 8.5, 14.5, 15.9999, 16.5, 20.0])
@pytest.mark.parametrize("architecture", ["gfx90a", "gfx942", "gfx1100"])
def test_scores_that_rise_by_little_or_much_stay_in_range(emulator: Any, architecture: str, above: float) -> None:
    """The maximum is raised only where a score outgrows it by some powers of two: `above` of them, from one tile of
    keys to the next. No probability leaves float16's range before it is: of values that are all 1 the result is 1."""
    device, keys = emulator.device(architecture), 128
    q, k, v = np.zeros((1, 3, 1, WIDTH)), np.zeros((1, keys, 1, WIDTH)), np.ones((1, keys, 1, WIDTH))
    high = np.float16(above * np.log(2)).astype(np.float64)
    low = np.float16(above * np.log(2) - high).astype(np.float64)  # so that a score is `above` to five digits
    q[..., :2], k[:, 64:, :, 0], k[:, 64:, :, 1] = 1, high, low
    scores = high + low
    arrays = [device.upload(a.astype(np.float16)) for a in (q, k, v)]
    arrays += [device.upload(np.zeros((1, 3), np.int32)), device.upload(np.array([keys - 3], np.int32))]
    o, lse = device.attention(*arrays, scale=1.0)
    np.testing.assert_allclose(device.download(o).astype(np.float64), 1, atol=2.0**-10)
    wanted = np.log(64 + np.exp(scores) * np.arange(keys - 66, keys - 63))
    np.testing.assert_allclose(device.download(lse)[0, 0], wanted, atol=1e-4)
