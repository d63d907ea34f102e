"""float16's range in the forward on the matrix units: keys far below the largest, where each counts little and all
together much. gfx90a's matrix unit takes float16 subnormals for zeros."""

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
