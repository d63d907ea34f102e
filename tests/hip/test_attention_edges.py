"""Keys that attention sees at and next to edges of steps and tiles: cache lengths, windows, starts of documents.

Queries of zeros make every key that is seen count the same. Then lse is the logarithm of their number, and o the mean
of their values: one key more or less shows, where a limit by roundings might hide it.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from wgrad.autograd.reference import ReferenceDevice

NAMES = ("q", "k", "v", "doc_start", "cache_len")
EDGES = (16, 32, 48, 64, 128)  # of a product, a step, a wave's queries, a tile of keys or queries, a work-group
NEAR = sorted({edge + by for edge in EDGES for by in (-1, 0, 1)})


def starts(queries: int, first: int) -> np.ndarray:
    """[batch, queries]: no document begins; one begins at each of NEAR, at key `first` + the query's number."""
    made = np.zeros((1 + len(NEAR), queries), np.int32)
    for row, at in zip(made[1:], NEAR):
        row[at:] = first + at
    return made


def seen(doc_start: np.ndarray, keys: int, first: int, window: int) -> np.ndarray:
    """[batch, queries, keys]"""
    i, j = first + np.arange(doc_start.shape[1])[:, None], np.arange(keys)
    return (j >= doc_start[..., None]) & (j <= i) & ((i - j < window) if window else True)


def values(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.random.default_rng(17).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize(
    ("width", "first", "window"),
    [
        *((64, *at) for at in ((0, 0), (0, 31), (0, 65), (31, 0), (33, 32), (64, 33), (65, 1), (63, 64))),
        *((256, *at) for at in ((0, 0), (33, 32), (30, 65))),
    ],
)
def test_forward_averages_the_keys_that_are_seen(hip_device: Any, width: int, first: int, window: int) -> None:
    queries, dtype = 131, ml_dtypes.bfloat16
    keys = first + queries
    doc_start = starts(queries, first)
    v = values((len(doc_start), keys, 1, width), dtype)
    x = {"q": np.zeros((len(doc_start), queries, 1, width), dtype), "k": values(v.shape, dtype), "v": v}
    x |= {"doc_start": doc_start, "cache_len": np.array([first], np.int32)}
    o, lse = hip_device.attention(*(hip_device.upload(x[n]) for n in NAMES), scale=1.0, window=window)
    mask = seen(doc_start, keys, first, window)
    count = mask.sum(2)
    np.testing.assert_allclose(hip_device.download(lse)[:, 0], np.log(count), atol=2e-5)
    wanted = np.einsum("btj,bjd->btd", mask / count[..., None], v[:, :, 0].astype(np.float64))
    np.testing.assert_allclose(hip_device.download(o)[:, :, 0].astype(np.float64), wanted, atol=2.0**-8 * 4)


@pytest.mark.parametrize("keys", [576, 640, 641])
@pytest.mark.parametrize("start", [0, 63, 64, 65, 319])
def test_shares_hidden_from_a_query_count_for_nothing(hip_device: Any, keys: int, start: int) -> None:
    """The whole of a share may be hidden from a query. Two rows, each with its place in every share.

    All scores are alike: 0, or so low or high that they leave exp's range.
    """
    queries, width, dtype = 3, 64, np.float16
    first = keys - queries
    doc_start = np.array([[0, start, start], [0, 0, start]], np.int32)
    v = values((2, keys, 1, width), dtype)
    x = {"q": np.zeros((2, queries, 1, width), dtype), "k": values(v.shape, dtype), "v": v}
    x |= {"doc_start": doc_start, "cache_len": np.array([first], np.int32)}
    score = {576: 0, 640: -128, 641: 128}[keys]
    x["q"][..., 0], x["k"][..., 0] = 1, score
    o, lse = hip_device.attention(*(hip_device.upload(x[n]) for n in NAMES), scale=1.0)
    mask = seen(doc_start, keys, first, 0)
    np.testing.assert_allclose(hip_device.download(lse)[:, 0], score + np.log(mask.sum(2)), atol=5e-5)
    wanted = np.einsum("btj,bjd->btd", mask / mask.sum(2)[..., None], v[:, :, 0].astype(np.float64))
    np.testing.assert_allclose(hip_device.download(o)[:, :, 0].astype(np.float64), wanted, atol=2.0**-11)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32], ids=["matrix", "plain"])
def test_queries_past_the_end_of_a_full_cache_see_all_of_it(hip_device: Any, dtype: Any) -> None:
    queries, keys, first = 5, 70, 68  # three queries have no key of their own
    v = values((1, keys, 1, 64), dtype)
    x = {"q": np.zeros((1, queries, 1, 64), dtype), "k": values(v.shape, dtype), "v": v}
    x |= {"doc_start": np.zeros((1, queries), np.int32), "cache_len": np.array([first], np.int32)}
    _, lse = hip_device.attention(*(hip_device.upload(x[n]) for n in NAMES), scale=1.0)
    np.testing.assert_allclose(hip_device.download(lse)[0, 0], np.log([69, 70, 70, 70, 70]), atol=2e-5)


@pytest.mark.parametrize(("width", "window"), [*((64, window) for window in (0, 1, 31, 33, 64)), (256, 0), (256, 33)])
def test_backward_sums_the_queries_that_see_a_key(hip_device: Any, width: int, window: int) -> None:
    """dv is a sum of 1 / (keys that a query sees) over the queries that see a key: of do = 1, exactly that."""
    queries, dtype = 131, np.float16
    doc_start = starts(queries, 0)
    batch = len(doc_start)
    zeros, ones = np.zeros((batch, queries, 1, width), dtype), np.ones((batch, queries, 1, width), dtype)
    k, v = values(zeros.shape, dtype), values((batch, queries, 1, width), dtype)
    origin = np.zeros(1, np.int32)
    o, lse = ReferenceDevice().attention(zeros, k, v, doc_start, origin, scale=1.0, window=window)
    inputs = (ones, zeros, k, v, o, lse, doc_start)
    dq, dk, dv = hip_device.attention_backward(*map(hip_device.upload, inputs), scale=1.0, window=window)
    mask = seen(doc_start, queries, 0, window)
    p = mask / mask.sum(2)[..., None]
    np.testing.assert_allclose(
        hip_device.download(dv)[:, :, 0].astype(np.float64), np.repeat(p.sum(1)[..., None], width, 2), rtol=2.0**-9
    )
    g = np.einsum("btd,bjd->btj", ones[:, :, 0].astype(np.float64), v[:, :, 0].astype(np.float64))
    delta = np.einsum("btd,btd->bt", ones[:, :, 0].astype(np.float64), o[:, :, 0].astype(np.float64))
    ds = p * (g - delta[..., None])
    wanted = np.einsum("btj,bjd->btd", ds, k[:, :, 0].astype(np.float64))
    np.testing.assert_allclose(
        hip_device.download(dq)[:, :, 0].astype(np.float64), wanted, atol=max(np.abs(wanted).max() / 256, 1e-5)
    )
    assert not hip_device.download(dk).astype(np.float64).any()  # queries of zeros
