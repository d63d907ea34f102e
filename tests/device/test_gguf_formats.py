"""The formats of GGUF against the gguf package: values of any bytes, what is quantized, and the rules of the parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from tests.gguf_formats import FORMAT_ROWS
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.contract import Device
from wgrad.device.errors import ShapeError
from wgrad.device.formats.codebook_tables import TABLES, codebook
from wgrad.device.formats.frozen_weight import formats, gguf_formats
from wgrad.device.formats.gguf_blocks import GgufBlocks
from wgrad.device.formats.q8_0 import Q8Array

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
# Formats that the package can quantize to, and the error of others.
SIMPLE = [name for name, row in FORMAT_ROWS.items() if not row.error]
NEAR = {name: row.error for name, row in FORMAT_ROWS.items() if row.error}


def any_blocks(name: str, rng: np.random.Generator, rows: int = 21) -> np.ndarray:
    """uint8 [rows, bytes], three blocks per row: all kinds of finite scales, subnormal and negative ones too."""
    size = gguf.GGML_QUANT_SIZES[Kind[name]][1]
    data = rng.integers(0, 256, (rows * 3, size), dtype=np.uint8)
    for at in FORMAT_ROWS[name].halves:
        exponents = rng.integers(0, 31, len(data)) << 10  # 0: subnormal
        bits = exponents | rng.integers(0, 1024, len(data)) | rng.integers(0, 2, len(data)) << 15
        data[:, at : at + 2] = bits.astype("<u2").view(np.uint8).reshape(-1, 2)
    if name == "IQ1_M":  # whose float16 is in pieces: the highest bit of its exponent
        data[:, 55] &= 0xBF
    if name == "MXFP4":  # below 2, powers are subnormal in float32, which devices may take for 0
        data[:, 0] = rng.permutation(np.resize(np.arange(2, 253), len(data)))
    return data.reshape(rows, -1)


def test_every_format_has_a_row() -> None:
    assert FORMAT_ROWS.keys() == gguf_formats().keys()


def shape_of(name: str, data: np.ndarray) -> tuple[int, int]:
    block, size = gguf.GGML_QUANT_SIZES[Kind[name]]
    return data.shape[0], data.shape[1] // size * block


@pytest.mark.parametrize("name", gguf_formats())
def test_values_are_those_of_gguf(name: str, device: Device, rng: np.random.Generator) -> None:
    data = any_blocks(name, rng, 101)
    wanted = gguf.dequantize(data, Kind[name])
    weight = gguf_formats()[name].from_gguf(data, shape_of(name, data))
    in_file, on_device = FORMAT_ROWS[name].in_file
    stored = data.nbytes // in_file * on_device
    table = getattr(weight, "grid", np.empty(0)).nbytes  # of a format with a codebook
    assert weight.nbytes == stored + table and all(holds for holds, _ in weight.rules())
    np.testing.assert_array_equal(weight.rows(7, 21, F32), wanted[7:21])
    np.testing.assert_allclose(weight.rows(7, 21, F64), wanted[7:21], rtol=2e-7, atol=1e-3 * np.abs(wanted).min())
    restored = device.download(device.dequantize(weight.map_arrays(device.upload)))
    np.testing.assert_array_equal(restored, wanted)


@pytest.mark.parametrize("scale", [1e-7, 1e-4, 0.02, 3.0])
@pytest.mark.parametrize("name", SIMPLE)
def test_what_is_quantized_is_what_gguf_makes(name: str, scale: float, rng: np.random.Generator) -> None:
    w = (scale * rng.standard_normal((37, 96 if gguf_formats()[name].block == 32 else 256))).astype(np.float32)
    w[3, 32:64] = 0
    w[5, 64:96] = np.arange(32) / 2 - 8  # halves, once 127 is the largest
    w[5, 70] = 127
    kind, weight = Kind[name], gguf_formats()[name].quantize(w)
    wanted = gguf.quantize(w, kind)
    np.testing.assert_array_equal(weight.rows(0, 37, F32), gguf.dequantize(wanted, kind))
    read = gguf_formats()[name].from_gguf(wanted, w.shape)
    for part, array in read.arrays().items():
        np.testing.assert_array_equal(array, weight.arrays()[part])


@pytest.mark.parametrize(("name", "limit"), NEAR.items())
def test_quantized_weights_have_the_error_of_their_bits(name: str, limit: float, rng: np.random.Generator) -> None:
    w = rng.standard_normal((8, 512)).astype(np.float32)
    w[3, :256] = 0
    found = gguf_formats()[name].quantize(0.02 * w).rows(0, 8, F32) / np.float32(0.02)
    assert limit / 2 < np.sqrt(np.mean((found - w) ** 2)) < limit
    assert np.all(found[3, :256] == 0)


@pytest.mark.parametrize("name", ["Q6_K", "IQ3_S"])
def test_rows_are_repeated(name: str, rng: np.random.Generator) -> None:
    data = any_blocks(name, rng, 3)
    kind: Any = gguf_formats()[name]
    weight = kind.from_gguf(data, shape_of(name, data))
    values = weight.rows(0, 3, F32)
    np.testing.assert_array_equal(weight.repeated(7).rows(0, 7, F32), values[[0, 1, 2, 0, 1, 2, 0]])


@pytest.mark.parametrize("name", gguf_formats())
def test_a_scale_that_is_not_finite_is_seen(name: str, rng: np.random.Generator) -> None:
    data = any_blocks(name, rng, 5)
    kind, shape = gguf_formats()[name], shape_of(name, data)
    assert all(np.isfinite(part).all() for part in kind.from_gguf(data, shape).finite_parts())
    for at in (0,) if name == "MXFP4" else FORMAT_ROWS[name].halves:
        bad = data.copy()
        bad[2, at : at + 2] = [253, data[2, 1]] if name == "MXFP4" else [0, 0x7C]
        assert not all(np.isfinite(part).all() for part in kind.from_gguf(bad, shape).finite_parts())


def test_rules_name_what_is_wrong(rng: np.random.Generator) -> None:
    cpu, weight = ReferenceDevice(), Q8Array.quantize(rng.standard_normal((4, 64)).astype(np.float32))
    assert cpu.dequantize(weight).shape == (4, 64)
    wrong = {
        "shape must have rows of whole blocks of 32, got 48": replace(weight, shape=(4, 48)),
        "w.codes": replace(weight, codes=weight.codes[1:]),
        "w.scales": replace(weight, scales=weight.scales.astype(np.float32)),
    }
    for message, bad in wrong.items():
        with pytest.raises(ShapeError, match=message):
            cpu.dequantize(bad)
    for name, kind in formats().items():
        if issubclass(kind, GgufBlocks):
            with pytest.raises(ShapeError, match=f"format must be one that devices bring weights into, got {name}"):
                cpu.quantize(rng.standard_normal((4, 64)).astype(np.float32), format=name)


def test_codebooks_are_those_of_the_gguf_package() -> None:
    from gguf import quants

    for name, (entries, cell, _) in TABLES.items():
        kind = getattr(quants, name.upper())
        kind.init_grid()
        values = kind.grid.reshape(entries, cell) + (name == "iq1_s")  # of which the least is -1
        np.testing.assert_array_equal(codebook(name), values, name)
