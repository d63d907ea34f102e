"""Every number of elements that may be left over after wide accesses, in memory and in views with neighbors."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.autograd.norms import check_layer_norm_of_equal_elements
from wgrad.autograd.reference import ReferenceDevice

SIZES = range(64, 73)
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


def numbers(size: int, dtype: Any) -> np.ndarray:
    return np.random.default_rng(size).integers(1, 9, size).astype(dtype)  # sums are exact


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_what_lies_behind_a_view_stays(hip_device: Any, dtype: Any) -> None:
    d = hip_device
    for size in SIZES:
        x = numbers(size, dtype)
        whole = d.upload(np.full(192, -7, dtype))
        d.add(d.upload(x), d.upload(x), out=d.view(whole, (size,), 64))
        around = np.full(64, -7), np.full(128 - size, -7)
        wanted = np.concatenate([around[0], 2 * x.astype(np.float64), around[1]])
        np.testing.assert_array_equal(d.download(whole).astype(np.float64), wanted)
        d.copy(d.upload(x), d.view(whole, (size,), 64))
        wanted = np.concatenate([around[0], x.astype(np.float64), around[1]])
        np.testing.assert_array_equal(d.download(whole).astype(np.float64), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_what_lies_behind_the_last_element_counts_for_nothing(hip_device: Any, dtype: Any) -> None:
    """It is NaN, or cannot be read at all."""
    d = hip_device
    for size in SIZES:
        x = numbers(size, dtype)
        behind = d.upload(np.concatenate([x, np.full(128 - size, np.nan, dtype)]))
        for array in (d.upload(x), d.view(behind, (size,))):
            assert d.download(d.sum(array)) == x.astype(np.float64).sum()
            keep = np.arange(size, dtype=np.uint32) % 2
            masked = np.where(keep, x.astype(np.float64), -1)
            np.testing.assert_array_equal(d.download(d.mask(array, d.upload(keep), -1.0)).astype(np.float64), masked)
            if dtype == np.float32:
                found = d.download(d.grad_norm(array))
                np.testing.assert_array_equal(found, [(x.astype(np.float64) ** 2).sum(), 0])


@pytest.mark.parametrize("columns", range(4, 25))
def test_a_bias_goes_on_from_row_to_row(hip_device: Any, columns: int) -> None:
    x, b = numbers(5 * columns, np.float32).reshape(5, columns), numbers(columns, np.float32)
    np.testing.assert_array_equal(
        hip_device.download(hip_device.bias(hip_device.upload(x), hip_device.upload(b))), x + b
    )


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_norms_of_rows_that_start_within_an_access(hip_device: Any, op: str) -> None:
    """Every other row of 12 float16 starts at 8 bytes of the 16 that an aligned row is read by."""
    x, weight, bias = numbers(36, np.float16).reshape(3, 12), numbers(12, np.float32), numbers(13, np.float32)[1:]
    terms = (weight,) if op == "rms_norm" else (weight, bias)

    def results(device: Any) -> list[np.ndarray]:
        arrays = [device.upload(a) for a in (x, *terms)]
        made = getattr(device, op)(*arrays, 1e-5)
        back = getattr(device, f"{op}_backward")(device.upload(x[::-1].copy()), *arrays[:2], *made[1:])
        return [np.asarray(device.download(a), np.float64) for a in (*made, *back)]

    for found, wanted in zip(results(hip_device), results(ReferenceDevice()), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("columns", [249, 1021, 5001])
def test_layer_norm_of_equal_elements(hip_device: Any, columns: int) -> None:
    check_layer_norm_of_equal_elements(hip_device, columns)


@pytest.mark.parametrize("architecture", ["gfx942"])
def test_nothing_is_read_behind_the_last_element(emulator: Any, architecture: str) -> None:
    """Clang leaves out what the tests above read there, as nobody uses it; clang for AMD need not."""
    d = emulator.unoptimized(architecture)
    for size in SIZES:
        x = numbers(size, np.float32)
        np.testing.assert_array_equal(d.download(d.add(d.upload(x), d.upload(x))), 2 * x)
