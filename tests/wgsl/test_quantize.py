"""NF4: codes and absmax equal to the reference's (which is held to bitsandbytes), bit for bit, at every block size."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.formats.frozen_weight import formats
from wgrad.device.formats.nf4 import LEVELS, NF4Array, dynamic_map, thresholds
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.formats.quantize import decode_in_blocks

BLOCK_SIZES = [32, 64, 128, 256, 512, 1024, 2048, 4096]
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


def to_host(device: WgpuDevice, q: NF4Array) -> NF4Array:
    return q.map_arrays(device.download)


def same_codes(found: NF4Array, wanted: NF4Array) -> bool:
    """All whole bytes, and the high nibble of the last."""
    n = wanted.shape[0] * wanted.shape[1]
    whole = np.array_equal(found.packed[: n // 2], wanted.packed[: n // 2])
    return whole and (n % 2 == 0 or found.packed[-1] >> 4 == wanted.packed[-1] >> 4)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shape", [(41, 123), (3, 5), (37, 264)], ids=str)
def test_quantizing_and_back_equals_the_reference(shape, dtype, block_size, wgpu_device, rng) -> None:
    reference = ReferenceDevice()
    w = (0.02 * rng.standard_normal(shape)).astype(dtype)
    w.reshape(-1)[: min(block_size, w.size // 2)] = 0  # for the smaller block sizes, a block of zeros
    quantized = wgpu_device.quantize(wgpu_device.upload(w), block_size)
    found, wanted = to_host(wgpu_device, quantized), reference.quantize(w, block_size)
    assert same_codes(found, wanted)
    np.testing.assert_array_equal(found.absmax, wanted.absmax)
    for out in (np.float32, np.float16) if wgpu_device.float16 else (np.float32,):
        y = wgpu_device.download(wgpu_device.dequantize(quantized, out))
        np.testing.assert_array_equal(y, reference.dequantize(wanted, out))


@pytest.mark.parametrize("block_size", [64, 32, 4096])
@pytest.mark.parametrize("shape", [(41, 123), (3, 5), (700, 97), (600, 200)], ids=str)
def test_double_quantization_rounds_scales_as_the_reference(shape, block_size, wgpu_device, rng) -> None:
    """The mean is a float32 sum here and may differ in its last bits; all that follows from it must not."""
    reference = ReferenceDevice()
    w = (0.02 * rng.standard_normal(shape) * rng.uniform(0.5, 2, (shape[0], 1))).astype(np.float32)
    quantized = wgpu_device.quantize(wgpu_device.upload(w), block_size, double=True)
    found = to_host(wgpu_device, quantized)
    plain = reference.quantize(w, block_size)
    assert same_codes(found, plain)
    assert found.nested_absmax is not None and found.nested_offset is not None and found.nested_code is not None
    np.testing.assert_array_equal(found.nested_code, dynamic_map())
    assert found.nested_offset[0] == pytest.approx(plain.absmax.mean(dtype=np.float64), rel=4 * 2**-24)
    centered = plain.absmax - found.nested_offset[0]
    blocks = np.resize(np.append(centered, np.zeros(-centered.size % 256, np.float32)), (-(-centered.size // 256), 256))
    np.testing.assert_array_equal(found.nested_absmax, np.abs(blocks).max(axis=1))
    limits = thresholds(dynamic_map())
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = blocks * (np.float32(1) / found.nested_absmax)[:, None]
    codes = np.searchsorted(limits, np.nan_to_num(scaled).reshape(-1)[: centered.size], side="left")
    np.testing.assert_array_equal(found.absmax, codes)
    for out in (np.float32, np.float16) if wgpu_device.float16 else (np.float32,):
        y = wgpu_device.download(wgpu_device.dequantize(quantized, out)).astype(np.float64)
        wanted = reference.dequantize(found, out).astype(np.float64)
        # code * absmax + offset may be one fused multiply-add or two roundings: a unit or two in the last place.
        np.testing.assert_allclose(y, wanted, rtol=2 * float(np.finfo(out).eps), atol=1e-8)


def test_values_next_to_a_threshold_have_the_references_codes(
    wgpu_device: WgpuDevice, rng: np.random.Generator
) -> None:
    """Here a reciprocal that is off by one unit in the last place shows in a code: divisions on a GPU often are."""
    peaks = np.abs(rng.standard_normal(20_000).astype(np.float32)) * np.exp2(rng.integers(-30, 30, 20_000))
    peaks = peaks.astype(np.float32)
    w = peaks[:, None] * thresholds(LEVELS)[rng.integers(0, 15, (20_000, 32))]
    w[:, 0] = peaks
    wanted = ReferenceDevice().quantize(w, 32)
    assert same_codes(to_host(wgpu_device, wgpu_device.quantize(wgpu_device.upload(w), 32)), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("double", [False, True])
def test_windows_have_the_bits_of_one_binding(double, dtype, wgpu_device, narrow, rng) -> None:
    w = rng.standard_normal((601, 123)).astype(dtype)
    assert w.nbytes > narrow.max_binding_bytes
    one = wgpu_device.quantize(wgpu_device.upload(w), 64, double=double)
    many = narrow.quantize(narrow.upload(w), 64, double=double)
    for a, b in zip(dataclasses.astuple(to_host(wgpu_device, one)), dataclasses.astuple(to_host(narrow, many))):
        np.testing.assert_array_equal(a, b)
    y = narrow.download(narrow.dequantize(many))
    np.testing.assert_array_equal(y, wgpu_device.download(wgpu_device.dequantize(one)))


@pytest.mark.parametrize("scale", [1.0, 0.02, 1e-4, 1e-5, 1e-6, 1e-7])
@pytest.mark.parametrize("value_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("columns", [128, 67])
def test_restored_values_are_rounded_to_nearest_even(columns, value_dtype, scale, wgpu_device, rng) -> None:
    """Bit for bit as NumPy rounds, float16's subnormals included (all of the smaller scales)."""
    w = (scale * rng.standard_normal((96, columns))).astype(np.float32)
    for double in (False, True):
        plain = ReferenceDevice().quantize(w, 64, double=double)
        wanted = ReferenceDevice().dequantize(plain).astype(value_dtype).astype(np.float32)
        arrays = {n: wgpu_device.upload(a) for n, a in vars(plain).items() if isinstance(a, np.ndarray)}
        weight = dataclasses.replace(plain, **arrays, value_dtype=value_dtype)
        np.testing.assert_array_equal(wgpu_device.download(wgpu_device.dequantize(weight)), wanted)


@pytest.mark.parametrize("value_dtype", ["float16", "bfloat16"])
def test_ties_go_to_the_even_value(value_dtype, wgpu_device, monkeypatch) -> None:
    """Scales in the middle between two values, at the largest level, which is 1; and their neighbors in float32."""
    step = 2.0**-11 if value_dtype == "float16" else 2.0**-8  # half of the distance of values above 1
    middles = np.array([1 + step, 1 + 3 * step, 1 + 5 * step], np.float32)
    smallest = 2.0**-24 * np.array([0.5, 1.5, 2.5, 3.5, 1023.5], np.float32)  # float16's subnormals
    middles = np.concatenate([middles * np.float32(2.0**e) for e in (-13, -3, 0, 7)] + [smallest])
    scales = np.concatenate([middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(np.inf))])
    packed = np.full(scales.size * 16, 0xF0, np.uint8)  # 1 and -1
    weight = NF4Array(packed, scales, (scales.size, 32), 32, value_dtype=value_dtype)
    wanted = np.stack([scales, -scales], axis=1).astype(value_dtype).astype(np.float32)
    np.testing.assert_array_equal(ReferenceDevice().dequantize(weight)[:, :2], wanted)
    there = dataclasses.replace(weight, packed=wgpu_device.upload(packed), absmax=wgpu_device.upload(scales))
    found = wgpu_device.download(wgpu_device.dequantize(there))
    np.testing.assert_array_equal(found, np.tile(wanted, 16))
    monkeypatch.setattr(wgpu_device, "software", False)  # the product that decodes by itself
    eye = wgpu_device.upload(np.eye(32, dtype=np.float32))
    np.testing.assert_array_equal(wgpu_device.download(wgpu_device.linear_quantized(eye, there)).T, found)


@pytest.mark.parametrize("format", ["nf4", "q4_k", "q8_0", "iq2_xs"])
def test_blocks_hold_what_rows_hold(wgpu_device: Any, format: str) -> None:
    """The same bits, from units of different lengths, where neither side divides what a workgroup takes."""
    values = np.random.default_rng(3).standard_normal((48, 768)).astype(np.float32)
    weight = formats()[format].quantize(values, double=format == "nf4").map_arrays(wgpu_device.upload)
    half = np.dtype(np.float16)
    rows = wgpu_device.download(wgpu_device.dequantize(weight, half)).view(np.uint16)
    blocks = rows.reshape(3, 16, 48, 2, 8).transpose(0, 2, 3, 1, 4).reshape(rows.shape)
    found = wgpu_device.download(decode_in_blocks(wgpu_device, weight)).view(np.uint16)
    np.testing.assert_array_equal(found, blocks)
