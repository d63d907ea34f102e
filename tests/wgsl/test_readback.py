"""Downloads: they return as soon as the device has the data, not when all work is done."""

from __future__ import annotations

import gc

import numpy as np

from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.runtime import submission_queue


def _seen_before_the_rest(device: WgpuDevice) -> bool:
    x = device.upload(np.ones((256, 1024), np.float32))
    first = device.readback(x)
    for _ in range(16):  # a submission each, so that wgpu has a later one to wait for
        device.gemm(x, x, trans_b=True)
        device.flush()
    last = device.readback(x)
    while not first.ready():
        pass
    seen = not last.ready()
    for later in (first, last):
        np.testing.assert_array_equal(later.result(), np.ones((256, 1024), np.float32))
    return seen


def test_what_is_read_in_the_middle_is_there_before_the_rest_is_done(wgpu_device: WgpuDevice) -> None:
    """The gradient's buckets travel by this. Tried again where the machine took its time between two questions."""
    assert any(_seen_before_the_rest(wgpu_device) for _ in range(5))


def test_it_goes_where_it_is_told_to(wgpu_device: WgpuDevice) -> None:
    """Read an odd number of bytes, too, without touching any next to them."""
    for dtype in (np.float32, np.float16, np.uint8):
        host = np.arange(7).astype(dtype)
        space = np.full(9, 50, dtype)
        out = space[1:8]
        assert wgpu_device.readback(wgpu_device.upload(host), out).result() is out
        np.testing.assert_array_equal(space, np.array([50, *range(7), 50], dtype))
    assert wgpu_device.readback(wgpu_device.empty((0, 5))).result().shape == (0, 5)


def test_one_that_nobody_asks_for_leaves_nothing(wgpu_device: WgpuDevice) -> None:
    x = wgpu_device.upload(np.ones(100, np.float32))
    for _ in range(3):
        wgpu_device.readback(x)
    gc.collect()
    np.testing.assert_array_equal(wgpu_device.readback(x).result(), np.ones(100, np.float32))
    assert not submission_queue._under_way
