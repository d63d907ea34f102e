"""Fixtures of the wgpu tests: a device on which little fits one binding, and one with tensor cores, emulated."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.wgsl.matrix_emulation import emulated, with_matrix_units
from tests.wgsl.small_tiles import (
    SMALL_FEW,
    SMALL_LARGE,
    SMALL_LORA,
    SMALL_MEDIUM,
    SMALL_NARROW,
    SMALL_SKINNY,
    SMALL_TWO,
)
from tests.wgsl.workgroup_poison import poisoned
from wgrad.autograd.bind import bind
from wgrad.device.contract import Device
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.gemm import gemm_matrix, gemm_matrix_lora, gemm_matrix_skinny
from wgrad.wgsl.runtime import compile as wgsl_compile

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


_with_matrix_units = cache(with_matrix_units)


@pytest.fixture
def matrix_device(wgpu_device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A device that takes the shaders for tensor cores, emulated. launched: those that this test has launched."""
    device = _with_matrix_units()
    if not device.float16:
        pytest.skip("the device has no float16")
    plain, launch = wgsl_compile.assemble, device.launch
    launched: set[str] = set()

    def assemble(source: str, constants: dict) -> str:
        return emulated(plain(source, constants), constants.get("LANES", device.lanes))

    def noted(
        shader: str, arrays: Any, params: Any, groups: Any, constants: dict[str, Any] | None = None, **options: Any
    ) -> None:
        launched.add(shader)
        lanes = (constants or {}).get("LANES", device.lanes)
        assert "matrix" not in shader or lanes == device.lanes, "the emulation would run a kernel for other subgroups"
        launch(shader, arrays, params, groups, constants, **options)

    monkeypatch.setattr(wgsl_compile, "assemble", assemble)
    monkeypatch.setattr(device, "launch", noted)
    monkeypatch.setattr(device, "launched", launched, raising=False)
    yield device
    device.synchronize()


@cache
def _poisoned() -> Any:
    return bind(WgpuDevice)()


@pytest.fixture
def poisoned_device(wgpu_device: Device, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device whose shaders find workgroup memory that does not begin as zeros (workgroup_poison.py)."""
    plain = wgsl_compile.assemble
    monkeypatch.setattr(wgsl_compile, "assemble", lambda source, constants: poisoned(plain(source, constants)))
    return _poisoned()


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use tiles of tensor cores that a software driver compiles soon."""
    monkeypatch.setattr(gemm_matrix, "LARGE", SMALL_LARGE)
    monkeypatch.setattr(gemm_matrix, "TWO_AT_ONCE", SMALL_TWO)
    monkeypatch.setattr(gemm_matrix, "OF_HEADS", SMALL_LARGE)
    monkeypatch.setattr(gemm_matrix, "MEDIUM", SMALL_MEDIUM)
    monkeypatch.setattr(gemm_matrix, "NARROW", SMALL_NARROW)
    monkeypatch.setattr(gemm_matrix, "WEIGHT_TILES", dict.fromkeys((8, 16), (SMALL_LARGE,)))
    monkeypatch.setattr(gemm_matrix, "FEW_ROWS_TILES", (SMALL_FEW,))
    monkeypatch.setattr(gemm_matrix, "FEW_ROWS_OF_ARRAYS", SMALL_FEW)
    monkeypatch.setattr(gemm_matrix_lora, "TILE", SMALL_LORA)
    monkeypatch.setattr(gemm_matrix_lora, "_AT_ONCE", 6)  # so that shares have several tiles
    for name in ("_NARROW", "_WIDE"):
        monkeypatch.setattr(gemm_matrix_skinny, name, SMALL_SKINNY)
    monkeypatch.setattr(gemm_matrix_skinny, "_tiles", lambda product: (SMALL_SKINNY,))
    monkeypatch.setattr(gemm_matrix_skinny, "_WANTED", {SMALL_SKINNY: 30})  # of 208 x 624 four shares of five blocks
