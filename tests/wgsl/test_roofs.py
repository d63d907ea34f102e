"""The kernels that measure a device's rates: that they do all the arithmetic that is counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.wgsl.matrix_emulation import emulated
from wgrad.wgsl.roofline import roofs
from wgrad.wgsl.runtime import compile as wgsl_compile


@pytest.mark.parametrize("element", ["f32", "f16"])
def test_multiply_adds_are_computed_as_often_as_counted(element: str, wgpu_device: Any) -> None:
    """s = s / 2 + 1 / 2 as often as is said."""
    if element == "f16" and not wgpu_device.float16:
        pytest.skip("the device has no float16")
    kind: Any = np.float32 if element == "f32" else np.float16
    for passes in (0, 1, 3):
        found = wgpu_device.download(roofs._multiply_adds(wgpu_device, element, 3, passes)).reshape(3, 256)
        sums = (np.add.outer(np.arange(256), np.arange(roofs._CHAINS)) % 61).astype(kind)
        for _ in range(passes * roofs._REPEATS):
            sums = (sums * kind(0.5) + kind(0.5)).astype(kind)
        wanted = roofs._LANES * sums.astype(np.float64).sum(axis=1)
        np.testing.assert_allclose(found, np.tile(wanted, (3, 1)), rtol=1e-6 if element == "f32" else 4e-3)


def test_dot_products_are_computed_as_often_as_counted(wgpu_device: Any) -> None:
    """s = s + s · factor, of their bytes, as often as is said."""
    factor = np.array([1, 2, -1, 1], np.int8).astype(np.int32)
    for passes in (0, 1, 3):
        found = wgpu_device.download(roofs._dot_products(wgpu_device, 3, passes)).reshape(3, 256)
        sums = np.add.outer(np.arange(256), np.arange(roofs._DOT_CHAINS)).astype(np.int32)
        for _ in range(passes * roofs._REPEATS):
            sums = sums + (sums.view(np.int8).reshape(256, -1, 4) * factor).sum(axis=2, dtype=np.int32)
        np.testing.assert_array_equal(found, np.tile(np.bitwise_xor.reduce(sums, axis=1), (3, 1)))


def test_matrix_multiply_adds_are_computed_as_often_as_counted(
    wgpu_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not wgpu_device.float16:
        pytest.skip("the device has no float16")
    plain = wgsl_compile.assemble
    monkeypatch.setattr(
        wgsl_compile, "assemble", lambda source, constants: emulated(plain(source, constants), constants["LANES"])
    )
    passes = 3
    found = wgpu_device.download(roofs.matrix_multiply_adds(wgpu_device, 2, passes))
    factors = ((np.arange(6 * 256) % 13) / 16).reshape(6, 16, 16)
    products = [factors[i] @ factors[2 + j] for i in range(2) for j in range(4)]
    assert len(products) == roofs._MATRICES
    np.testing.assert_allclose(found, np.broadcast_to(passes * sum(products), found.shape), rtol=1e-6)


def test_what_is_listed_is_what_the_device_has(wgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgpu_device, "float16", True)
    assert [r.name for r in wgpu_device.roofs()] == ["float32", "float16", "int8"]
    monkeypatch.setattr(wgpu_device, "matrix_units", True)
    assert [r.name for r in wgpu_device.roofs()] == ["float32", "float16", "int8", "tensor cores"]
    monkeypatch.setattr(wgpu_device, "float16", False)
    monkeypatch.setattr(wgpu_device, "matrix_units", False)
    plain, dots = wgpu_device.roofs()
    groups, passes = roofs._SOFTWARE_GROUPS, roofs._SOFTWARE_PASSES
    if wgpu_device.software:  # a multiplication and an addition of each lane
        assert plain.flop == groups * 256 * passes * 8 * 4 * 4 * 2
        assert dots.flop == groups * 256 * passes * 16 * 4 * 4 * 2  # of four pairs
