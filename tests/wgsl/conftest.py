"""Fixtures of the wgpu tests: a comparison with float64, and a device on which little fits one binding."""

from __future__ import annotations

import numpy as np
import pytest

from wgrad.autograd.bind import bind
from wgrad.device.contract import Device
from wgrad.wgsl.device import WgpuDevice

NARROW_BYTES = 1 << 16


@pytest.fixture(autouse=True)
def _float16_where_there_is(request: pytest.FixtureRequest) -> None:
    """Skips the float16 variant of a test on a device that has no float16 arrays."""
    callspec = getattr(request.node, "callspec", None)
    dtype = callspec.params.get("dtype") if callspec is not None else None
    if dtype is not None and np.dtype(dtype) == np.float16 and not request.getfixturevalue("wgpu_device").float16:
        pytest.skip("the device has no float16")


@pytest.fixture(scope="session")
def _narrow() -> list[WgpuDevice]:
    return []


@pytest.fixture
def narrow(wgpu_device: Device, _narrow: list[WgpuDevice]) -> WgpuDevice:
    """A device whose bindings hold 64 KiB: larger arrays are taken in windows."""
    if not _narrow:
        _narrow.append(bind(WgpuDevice)(max_binding_bytes=NARROW_BYTES))
    return _narrow[0]
