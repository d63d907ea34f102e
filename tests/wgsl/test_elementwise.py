"""Element-wise operators: windows, aliased outputs, copies of odd sizes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from wgrad.wgsl.device import WgpuDevice

F32, F16 = np.dtype(np.float32), np.dtype(np.float16)
OPERATORS = {
    "add": lambda d, x: d.add(x["a"], x["b"]),
    "add in place": lambda d, x: d.add(x["a"], x["b"], out=x["a"]),
    "mul": lambda d, x: d.mul(x["a"], x["b"]),
    "scale": lambda d, x: d.scale(x["a"], 0.3),
    "scale_by": lambda d, x: d.scale_by(x["a"], x["factor"]),
    "mask": lambda d, x: d.mask(x["a"], x["keep"], -3.5),
    "bias": lambda d, x: d.bias(x["a"], x["row"]),
    "cast": lambda d, x: d.cast(x["bf16"], F32),
}


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("shape", [(601, 60), (331, 123)], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_arrays_larger_than_a_binding_are_computed_in_windows(name, shape, dtype, narrow, compare, rng) -> None:
    inputs = {
        "a": rng.standard_normal(shape).astype(dtype),
        "b": rng.standard_normal(shape).astype(dtype),
        "bf16": rng.standard_normal(shape).astype(ml_dtypes.bfloat16),
        "row": rng.standard_normal(shape[1]).astype(np.float32),
        "keep": (rng.random(shape) < 0.5).astype(np.uint32),
        "factor": np.array([1.7], np.float32),
    }
    assert inputs["keep"].nbytes > narrow.max_binding_bytes
    compare(narrow, lambda d, x: {"y": OPERATORS[name](d, x)}, inputs)


def test_add_where_arrays_share_memory(wgpu_device: WgpuDevice, rng: np.random.Generator) -> None:
    flat = rng.standard_normal(320).astype(np.float32)
    other = rng.standard_normal(100).astype(np.float32)
    for first, second in ((0, 128), (128, 0), (0, 0)):
        memory = wgpu_device.upload(flat)
        a, b = wgpu_device.view(memory, (100,), first), wgpu_device.view(memory, (100,), second)
        out = wgpu_device.view(memory, (100,), 0)
        wgpu_device.add(a, b, out=out)
        wanted = flat.copy()
        wanted[:100] = flat[first : first + 100] + flat[second : second + 100]
        np.testing.assert_array_equal(wgpu_device.download(memory), wanted)
    memory = wgpu_device.upload(flat)
    wgpu_device.add(
        wgpu_device.view(memory, (100,), 64), wgpu_device.upload(other), out=wgpu_device.view(memory, (100,))
    )
    np.testing.assert_array_equal(wgpu_device.download(memory)[:100], flat[64:164] + other)


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.int32])
@pytest.mark.parametrize("size", [1, 3, 37, 64, 1003, 5001])
def test_copy_leaves_the_neighbors_alone(size, dtype, wgpu_device, rng) -> None:
    src = rng.integers(1, 100, size).astype(dtype)
    wide = rng.integers(100, 200, size + 17).astype(dtype)
    memory = wgpu_device.upload(wide)
    wgpu_device.copy(wgpu_device.upload(src), wgpu_device.view(memory, (size,)))
    np.testing.assert_array_equal(wgpu_device.download(memory), np.concatenate([src, wide[size:]]))


def test_copy_inside_one_buffer_and_over_windows(wgpu_device: WgpuDevice, narrow: WgpuDevice) -> None:
    values = np.arange(50_001, dtype=np.float32)
    memory = wgpu_device.upload(values)
    wgpu_device.copy(wgpu_device.view(memory, (200,), 128), wgpu_device.view(memory, (200,), 64))
    np.testing.assert_array_equal(wgpu_device.download(memory)[64:264], values[128:328])
    out = narrow.zeros(values.shape)
    narrow.copy(narrow.upload(values), out)
    np.testing.assert_array_equal(narrow.download(out), values)


def test_a_cast_that_overflows_is_not_finite(wgpu_device: WgpuDevice) -> None:
    """Loss scaling finds an overflow by its infinity: a device that saturates would train on wrong gradients."""
    if not wgpu_device.float16:
        pytest.skip("the device has no float16")
    x = np.array([1.0, 7e4, -7e4, 1e30], np.float32)
    found = wgpu_device.download(wgpu_device.cast(wgpu_device.upload(x), F16))
    np.testing.assert_array_equal(np.isfinite(found), [True, False, False, False])
