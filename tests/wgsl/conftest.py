"""Fixtures of the wgpu tests: a comparison with float64, and a device on which little fits one binding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from wgrad.autograd.device import Device
from wgrad.autograd.selftest import check_case
from wgrad.autograd.selftest_cases import Case, Inputs, Outputs
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
        _narrow.append(WgpuDevice(max_binding_bytes=NARROW_BYTES))
    return _narrow[0]


@pytest.fixture
def compare() -> Callable[..., None]:
    """compare(device, call, inputs): `call(device, inputs)` against float64, with the self-test's limits."""

    def run(
        device: Any,
        call: Callable[[Any, Inputs], Outputs],
        inputs: Inputs,
        *,
        backward: bool = False,
        ulps: float = 4.0,
    ) -> None:
        direction = "backward" if backward else "forward"
        result = check_case(Case("", "", direction, "", "", lambda rng: inputs, call, ulps), device)
        assert result.ok, f"{result.output} is off by {result.error:.3g}, allowed {result.limit:.3g}"

    return run
