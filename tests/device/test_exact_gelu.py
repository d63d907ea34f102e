"""Exact GELU: float32's polynomial against the normal distribution function in float64."""

import math

import numpy as np
import pytest

from wgrad.device.contract import Device
from wgrad.device.exact_gelu import gelu_exact, gelu_exact_slope

X = np.concatenate([np.linspace(-17, 17, 20_001), [-1e-30, 1e-30, -65504, 65504, -3e38, 3e38]]).astype(np.float32)


def by_definition() -> tuple[np.ndarray, np.ndarray]:
    below = np.array([math.erfc(-x / math.sqrt(2)) / 2 for x in X.tolist()])
    density = np.array([math.exp(-min(x * x, 1e3) / 2) / math.sqrt(2 * math.pi) for x in X.tolist()])
    return X.astype(np.float64) * below, below + X * density


def by_numpy() -> tuple[np.ndarray, np.ndarray]:
    return gelu_exact(X), gelu_exact_slope(X)


def on(gpu: Device) -> tuple[np.ndarray, np.ndarray]:
    x, view = gpu.upload(X), (((1,), 0),)
    names = ("gelu_exact", "gelu_exact_slope")
    value, slope = (gpu.download(gpu.fused((("load", 0), (name, 0)), (x,), view, (), X.shape)) for name in names)
    return value, slope


@pytest.mark.parametrize("device", ["numpy", "wgpu"])
def test_exact_gelu_is_right_to_float32s_last_bits_for_any_number(device: str, request: pytest.FixtureRequest) -> None:
    value, slope = by_definition()
    found = by_numpy() if device == "numpy" else on(request.getfixturevalue("wgpu_device"))
    assert (np.abs(found[0] - value) <= 2.0**-22 * np.maximum(np.abs(value), 1)).all()
    assert np.abs(found[1] - slope).max() <= 2.0**-21
    negative = (-6 < X) & (X < 0)  # the tail keeps its digits
    assert (np.abs(found[0] - value)[negative] <= 2e-5 * np.abs(value[negative])).all()


def test_exact_gelu_in_float64_is_exact() -> None:
    value, slope = by_definition()
    x = X.astype(np.float64)
    np.testing.assert_allclose(gelu_exact(x), value, rtol=1e-14, atol=1e-30)
    np.testing.assert_allclose(gelu_exact_slope(x), slope, rtol=1e-12, atol=1e-30)
