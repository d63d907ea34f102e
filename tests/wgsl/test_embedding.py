"""Embedding: tables larger than a binding in all dtypes, and a deterministic backward with repeated ids."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from wgrad.autograd.reference import ReferenceDevice


@pytest.mark.parametrize("table_dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(700, 64), (1003, 37), (301, 130)], ids=str)
def test_gather_is_exact(shape, table_dtype, wgpu_device, narrow, rng) -> None:
    table = rng.standard_normal(shape).astype(table_dtype)
    ids = rng.integers(0, shape[0], 97).astype(np.int32)
    ids[:3] = (0, shape[0] - 1, shape[0] // 2)
    assert table.size * 4 > narrow.max_binding_bytes
    for device in (wgpu_device, narrow):
        for dtype in (np.float32, np.float16) if device.float16 else (np.float32,):
            y = device.embedding(device.upload(table), device.upload(ids), dtype=dtype)
            np.testing.assert_array_equal(device.download(y), table.astype(np.float32)[ids].astype(dtype))


@pytest.mark.parametrize(("vocab", "columns", "tokens"), [(700, 64, 130), (301, 61, 250), (5, 1301, 12), (3, 8, 700)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_backward_adds_rows_in_order(vocab, columns, tokens, dtype, wgpu_device, narrow, rng) -> None:
    dy = rng.standard_normal((tokens, columns)).astype(dtype)
    ids = rng.integers(0, vocab, tokens).astype(np.int32)
    ids[5:9] = 1
    wanted = ReferenceDevice().embedding_backward(dy.astype(np.float64), ids, vocab)
    # Each row is added up in rising order in float32: at most a rounding a term.
    most = np.bincount(ids).max()
    for device in (wgpu_device, narrow):
        found = [device.embedding_backward(device.upload(dy), device.upload(ids), vocab) for _ in range(2)]
        first, second = (device.download(f) for f in found)
        np.testing.assert_array_equal(first, second)
        assert np.max(np.abs(first - wanted)) <= most * np.finfo(np.float32).eps * np.max(np.abs(wanted))
