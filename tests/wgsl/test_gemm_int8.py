"""Products of operands rounded to 8 bits: what rounding does to each format, the sums, which products are made so, and
what becomes of a number that is not finite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.case_results import assert_case
from wgrad.autograd.bind import bind
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.int8 import int8_cases
from wgrad.device.errors import DeviceError
from wgrad.device.formats.frozen_weight import FrozenWeight, formats
from wgrad.hip.device import HipDevice
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.formats.formats import FILES
from wgrad.wgsl.gemm import gemm_int8
from wgrad.wgsl.gemm.gemm_int8 import BLOCK, LEAST_ROWS, pack

F32, F16 = np.float32, np.float16


@pytest.fixture
def device(wgpu_device: Any) -> Iterator[Any]:
    found = bind(WgpuDevice)()
    found.round_products()
    yield found
    found.synchronize()


def weight_of(name: str, n: int, k: int, seed: int = 0) -> tuple[FrozenWeight, np.ndarray]:
    """Return a weight in NumPy and its values. Rows end with a block of the format, or else with a word of codes."""
    k = -(-k // formats()[name].block) * formats()[name].block
    values = (0.05 * np.random.default_rng(seed).standard_normal((n, k))).astype(F32)
    weight = formats()[name].quantize(values, 64, name == "nf4")
    return weight, weight.rows(0, n, np.dtype(np.float64))


def unpacked(device: Any, s: Any, i: int, k: int, across: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes [I, K] of an operand as the device rounds it, with zeros behind the last, and the scale of each."""
    packed = pack(device, s, 64, across=across)
    words, scales = device.download(packed.words), device.download(packed.scales)
    codes = words.view(np.int8).reshape(*words.shape, 4).transpose(1, 0, 2).reshape(words.shape[1], -1)
    assert not codes[:i, k:].any()
    return codes[:i, :k].astype(np.float64), np.repeat(scales.T, BLOCK, axis=1)[:i, :k].astype(np.float64)


@pytest.mark.parametrize("across", [False, True])
# One format of each shader file.
@pytest.mark.parametrize(
    "name", [*{FILES.get(name, name): name for name in formats()}.values(), "float32", "float16", "odd"]
)
def test_every_element_is_rounded_to_nearest(device: Any, name: str, across: bool) -> None:
    if name in formats():
        weight, values = weight_of(name, 71, 200)
        given = weight.map_arrays(device.upload)
    else:
        columns = 135 if name == "odd" else 136  # of which four cannot be read at once
        host = np.random.default_rng(1).standard_normal((71, columns)).astype(F16 if name == "float16" else F32)
        given, values = device.upload(host), host.astype(np.float64)
    values = values.T if across else values
    i, k = values.shape
    codes, scales = unpacked(device, given, i, k, across)
    blocks = np.pad(np.abs(values), ((0, 0), (0, -values.shape[1] % BLOCK))).reshape(len(values), -1, BLOCK)
    largest = np.repeat(blocks.max(axis=2), BLOCK, axis=1)[:, : values.shape[1]]
    np.testing.assert_allclose(scales, largest / 127, rtol=1e-6)
    assert np.abs(codes * scales - values).max() <= (0.5 + 1e-4) * scales.max()
    assert (np.abs(codes * scales - values) <= (0.5 + 1e-4) * scales).all()
    assert (np.abs(codes).max(axis=1) == 127).all()


def test_blocks_of_zeros_and_tiny_numbers_are_quantized(device: Any) -> None:
    """Zeros, numbers whose quotients are beyond float32, and the smallest that are not."""
    host = np.zeros((4, 3 * BLOCK), F32)
    host[1, :BLOCK], host[2, BLOCK : 2 * BLOCK], host[3] = 1e-38, -1e-34, np.linspace(-1e30, 1e30, 3 * BLOCK)
    codes, scales = unpacked(device, device.upload(host), 4, 3 * BLOCK, False)
    assert not codes[:2].any() and np.isfinite(scales).all()
    assert (codes[2, BLOCK : 2 * BLOCK] == -127).all()
    assert (np.abs(codes[3] * scales[3] - host[3]) <= 0.51 * scales[3]).all()


@pytest.mark.parametrize("case", int8_cases(float16=True), ids=lambda case: case.name)
def test_sums_are_those_of_integers(device: Any, case: Any) -> None:
    """The self-test's: operands that rounding leaves as they are."""
    if "float16" in case.name and not device.float16:
        pytest.skip("the device has no float16")
    assert_case(case, device)


def test_blocks_differ_in_scale(device: Any) -> None:
    """Each block of K with its own two scales: the product of what the operands are rounded to."""
    m, n, k = 140, 70, 336
    rng = np.random.default_rng(2)
    rows, columns = 10.0 ** rng.integers(-3, 4, (m, 1)), np.repeat([1, 30, 2, 9, 4, 1], 56)
    x = (rng.standard_normal((m, k)) * rows * columns).astype(F32)
    w = (rng.standard_normal((n, k)) * np.repeat([5, 1, 1, 40, 1, 3], 56)).astype(F32)
    weight = formats()["nf4"].quantize(w, 64, False).map_arrays(device.upload)
    left, right = unpacked(device, device.upload(x), m, k, False), unpacked(device, weight, n, k, False)
    expected = (left[0] * left[1]) @ (right[0] * right[1]).T
    found = device.download(device.linear_quantized(device.upload(x), weight))
    norms = np.linalg.norm(left[0] * left[1], axis=1)[:, None] * np.linalg.norm(right[0] * right[1], axis=1)
    assert (np.abs(found - expected) / norms).max() < 1e-6


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("backward", [False, True])
def test_what_is_not_finite_stays_so(device: Any, bad: float, backward: bool) -> None:
    """In its row, all of it, and in no other: a step with it must be seen."""
    weight, values = weight_of("nf4", 72, 136)
    host = np.random.default_rng(3).standard_normal((LEAST_ROWS, values.shape[0 if backward else 1])).astype(F32)
    host[37, 70] = bad
    multiply = device.linear_quantized_backward if backward else device.linear_quantized
    found = device.download(multiply(device.upload(host), weight.map_arrays(device.upload)))
    assert not np.isfinite(found[37]).any() and np.isfinite(np.delete(found, 37, axis=0)).all()


def shaders(
    device: Any, rows: int, width: int = 136, parts: tuple[int, ...] = (), outputs: int = 128, dtype: Any = F32
) -> set[str]:
    """Return the shaders that a GEMM launches in a dry run. parts: rows of each weight of a stack."""
    dry = device.dry_run()
    weight = formats()["nf4"].quantize(np.ones((outputs, width), F32), 64, False).map_arrays(dry.upload)
    weight = replace(weight, absmax=dry.empty((512,)), parts=parts) if parts else weight  # type: ignore[type-var]
    dry.linear_quantized(dry.upload(np.ones((rows, width), dtype)), weight)
    return {variant.shader for variant in dry.variants}


def test_int8_serves_only_where_asked_and_worth_it(device: Any, wgpu_device: Any) -> None:
    assert "gemm_int8" in shaders(device, LEAST_ROWS)
    assert "gemm_int8" not in shaders(device, LEAST_ROWS - 1)
    assert "gemm_int8" not in shaders(device, LEAST_ROWS, 132)  # its rows begin within a word of codes
    assert "gemm_int8" not in shaders(device, LEAST_ROWS, parts=(64, 64))
    assert "gemm_int8" not in shaders(wgpu_device, LEAST_ROWS)


def test_rounded_operands_fit_a_binding(device: Any) -> None:
    """A weight's, which is larger than the weight, and in float16 that of what it is multiplied with."""
    cases: list[tuple[int, int, Any, bool]] = [(495_360, 640, F32, False), (495_616, 640, F32, True)]
    cases += [(50_944, 136, F16, False), (51_200, 136, F16, True)] * device.float16
    for most, side, dtype, is_used in cases:
        narrow = bind(WgpuDevice)(max_binding_bytes=most)
        narrow.round_products()
        assert ("gemm_int8" in shaders(narrow, LEAST_ROWS, side, outputs=side, dtype=dtype)) == is_used, (most, dtype)


def test_few_tiles_are_split(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No result shows this."""
    weight, _ = weight_of("nf4", 64, 2048)
    x = device.upload(np.ones((128, 2048), F32))
    found: dict[str, Any] = {}
    launch = device.launch

    def noted(shader: str, arrays: Any, params: Any, groups: Any, *rest: Any, **options: Any) -> None:
        found[shader] = groups
        launch(shader, arrays, params, groups, *rest, **options)

    monkeypatch.setattr(device, "launch", noted)
    device.linear_quantized(x, weight.map_arrays(device.upload))
    assert found["gemm_int8"] == (1, 1, 4) and "gemm_reduce" in found


def test_a_weight_is_packed_once_for_all_chunks(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once forward and once backward, whose blocks lie the other way."""
    weight = weight_of("nf4", 64, 128)[0].map_arrays(device.upload)
    x, dy = (device.upload(np.ones((LEAST_ROWS, width), F32)) for width in (128, 64))
    packed: list[Any] = []

    def noted(device: Any, s: Any, multiple: int, *, across: bool = False) -> Any:
        packed.append(s)
        return pack(device, s, multiple, across=across)

    monkeypatch.setattr(gemm_int8, "pack", noted)
    with device.caching_dequantized():
        for _ in range(3):
            device.linear_quantized(x, weight)
            device.linear_quantized_backward(dy, weight)
    assert sum(s is weight for s in packed) == 2
    device.linear_quantized(x, weight)
    assert sum(s is weight for s in packed) == 3


def test_devices_with_faster_products_refuse(matrix_device: Any) -> None:
    hip: Any = HipDevice.__new__(HipDevice)
    for device, reason in (
        (matrix_device, "tensor cores, which are in use"),
        (hip, "matrix cores of HIP GPUs"),
        (ReferenceDevice(), "NumPy"),
    ):
        with pytest.raises(DeviceError, match=reason):
            device.round_products()
    assert not matrix_device.int8_products
