"""Sums: many rows and few, windows, numbers that are not finite, the same bits each time."""

from __future__ import annotations

import numpy as np
import pytest

from wgrad.wgsl.device import WgpuDevice

SHAPES = [(1, 5), (3001, 4), (5003, 1), (1030, 60), (77, 300), (2, 5001), (260, 1024)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("narrowed", [False, True], ids=["one binding", "windows"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_sum_rows_equals_the_reference(shape, narrowed, dtype, wgpu_device, narrow, compare, rng) -> None:
    if narrowed and 64 * shape[1] * 4 > narrow.max_binding_bytes and shape[0] > 64:
        shape = (shape[0], 123)  # 64 rows are the least that a window holds here
    x = rng.standard_normal(shape).astype(dtype)
    out = rng.standard_normal(shape[1]).astype(np.float32)

    def call(d, arrays):
        plain = d.sum_rows(arrays["x"])
        return {"plain": plain, "added": d.sum_rows(arrays["x"], out=arrays["out"], accumulate=True)}

    # A sum of R numbers in another order differs by about sqrt(R) roundings of its terms.
    compare(narrow if narrowed else wgpu_device, call, {"x": x, "out": out}, ulps=4 + shape[0] ** 0.5)


@pytest.mark.parametrize("size", [1, 255, 1024, 70_001, 300_000])
def test_sum_and_norm_equal_the_reference(size, wgpu_device, narrow, compare, rng) -> None:
    x = (1 + rng.standard_normal(size)).astype(np.float32)
    for device in (wgpu_device, narrow):
        compare(device, lambda d, a: {"sum": d.sum(a["x"]), "norm": d.grad_norm(a["x"])}, {"x": x})


def test_norm_counts_what_is_not_finite(wgpu_device: WgpuDevice, rng: np.random.Generator) -> None:
    for size in (4096, 4099):
        x = rng.standard_normal(size).astype(np.float32)
        places = rng.choice(size, 7, replace=False)
        x[places] = [np.nan, -np.nan, np.inf, -np.inf, np.inf, np.nan, -np.inf]
        squares, bad = wgpu_device.download(wgpu_device.grad_norm(wgpu_device.upload(x)))
        assert bad == 7
        assert squares == pytest.approx(np.sum(np.delete(x, places).astype(np.float64) ** 2), rel=1e-6)


def test_sums_are_the_same_bits_each_time(wgpu_device: WgpuDevice, rng: np.random.Generator) -> None:
    x = wgpu_device.upload(rng.standard_normal((3001, 123)).astype(np.float32))
    flat = wgpu_device.view(x, (x.size,))
    for operator, given in ((wgpu_device.sum, x), (wgpu_device.grad_norm, flat), (wgpu_device.sum_rows, x)):
        first = wgpu_device.download(operator(given))
        assert all((wgpu_device.download(operator(given)) == first).all() for _ in range(3))


def test_sum_rows_refuses_its_own_memory(wgpu_device: WgpuDevice) -> None:
    memory = wgpu_device.zeros((3, 64))
    with pytest.raises(ValueError, match="one buffer"):
        wgpu_device.sum_rows(memory, out=wgpu_device.view(memory, (64,)))
