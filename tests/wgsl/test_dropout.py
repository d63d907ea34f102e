"""Dropout: keep bits equal to the reference's Philox, over windows, and not the same for another seed or stream."""

from __future__ import annotations

import numpy as np
import pytest

from wgrad.autograd.ops.dropout import dropout_keep


@pytest.mark.parametrize("size", [1, 3, 64, 1003, 50_001, 60_000])
@pytest.mark.parametrize("p", [0.0, 0.05, 0.5, 0.999])
def test_keep_bits_are_the_same_over_windows(size, p, wgpu_device, narrow, rng) -> None:
    seed = rng.integers(0, 2**32, 2).astype(np.uint32)
    wanted = dropout_keep(size, p, seed, 99)
    for device in (wgpu_device, narrow):
        y = device.download(device.dropout(device.upload(np.ones(size, np.float32)), p, device.upload(seed), 99))
        np.testing.assert_array_equal(y != 0, wanted)
        np.testing.assert_allclose(y[wanted], 1 / (1 - p), rtol=3e-7)


def test_seed_and_salt_matter(wgpu_device) -> None:
    x = wgpu_device.upload(np.ones(4096, np.float32))

    def kept(low: int, high: int, stream: int) -> np.ndarray:
        seed = wgpu_device.upload(np.array([low, high], np.uint32))
        return wgpu_device.download(wgpu_device.dropout(x, 0.5, seed, stream)) != 0

    draws = [kept(1, 2, 3), kept(2, 2, 3), kept(1, 3, 3), kept(1, 2, 4)]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            # Independent fair bits agree in half of the places, give or take 5 standard deviations of 1/128.
            assert abs(np.mean(a == b) - 0.5) < 5 / 128
