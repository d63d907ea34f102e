"""NF4 in NumPy, against values worked out here element by element; and what launchers and rules ask of the format."""

from __future__ import annotations

import dataclasses

import ml_dtypes  # noqa: F401  (registers bfloat16)
import numpy as np
import pytest

from wgrad.device.formats.frozen_weight import formats
from wgrad.device.formats.nf4 import BLOCK_SIZES, LEVELS, NF4Array, dynamic_map, thresholds

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
SHAPES = [(41, 123), (3, 5), (1, 1), (600, 97)]


def weight(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return (0.1 * rng.standard_normal(shape)).astype(np.float32)


def restored(w: NF4Array) -> np.ndarray:
    """Element by element, in float32."""
    values = np.empty(w.shape, np.float32).reshape(-1)
    for i in range(values.size):
        byte, block = w.packed[i // 2], i // w.block_size
        scale = w.absmax[block]
        if w.nested_code is not None and w.nested_absmax is not None and w.nested_offset is not None:
            scale = w.nested_code[scale] * w.nested_absmax[block // w.nested_block_size] + w.nested_offset[0]
        values[i] = LEVELS[byte & 15 if i % 2 else byte >> 4] * scale
    return values.astype(w.value_dtype).astype(np.float32).reshape(w.shape)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.mark.parametrize("value_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_rows_are_the_formula(shape: tuple[int, int], double: bool, value_dtype: str, rng: np.random.Generator) -> None:
    w = dataclasses.replace(NF4Array.quantize(weight(rng, shape), 32, double), value_dtype=value_dtype)
    wanted = restored(w)
    np.testing.assert_array_equal(w.rows(0, shape[0], F32), wanted)
    for first in range(shape[0]):  # most begin inside of a byte and of a block
        np.testing.assert_array_equal(w.rows(first, first + 1, F32), wanted[first : first + 1])
    np.testing.assert_allclose(w.rows(0, shape[0], F64), wanted, rtol=2**-8 if value_dtype == "bfloat16" else 1e-3)
    assert w.rows(0, 1, F64).dtype == F64


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_code_is_of_the_nearest_level(shape: tuple[int, int], block_size: int, rng: np.random.Generator) -> None:
    w = weight(rng, shape)
    q = NF4Array.quantize(w, block_size)
    flat = np.pad(w.reshape(-1), (0, -w.size % block_size)).reshape(-1, block_size)
    np.testing.assert_array_equal(q.absmax, np.abs(flat).max(axis=1))
    scaled = w.reshape(-1) / np.repeat(q.absmax, block_size)[: w.size]
    chosen = np.stack([q.packed >> 4, q.packed & 15], axis=1).reshape(-1)[: w.size]
    best = np.abs(scaled[:, None] - LEVELS).min(axis=1)
    assert np.all(np.abs(scaled - LEVELS[chosen]) <= best + 1e-6)


def test_the_last_half_byte_is_zero_and_a_tie_takes_the_lower_code() -> None:
    tie = thresholds(LEVELS)[3]
    q = NF4Array.quantize(np.array([[1, tie, np.nextafter(tie, np.float32(1))]], np.float32), 32)
    assert q.packed.tolist() == [15 << 4 | 3, 4 << 4 | 7] and LEVELS[7] == 0


def test_double_quantization_keeps_codes_and_rounds_scales(rng: np.random.Generator) -> None:
    w = weight(rng, (600, 97))
    plain, double = NF4Array.quantize(w, 64), NF4Array.quantize(w, 64, True)
    np.testing.assert_array_equal(double.packed, plain.packed)
    assert double.nested_offset is not None and double.nested_absmax is not None
    assert double.nested_offset[0] == pytest.approx(plain.absmax.mean(), rel=1e-6)
    assert double.nested_absmax.shape == (-(-plain.absmax.size // 256),) and double.absmax.dtype == np.uint8
    spread = np.abs(plain.absmax - double.nested_offset).max()
    np.testing.assert_allclose(double._scales(np.arange(plain.absmax.size), F32), plain.absmax, atol=spread / 60)
    assert np.all(np.diff(dynamic_map()) > 0) and dynamic_map()[127] == 0 and dynamic_map()[255] == 1


def test_float64_is_quantized_in_float64(rng: np.random.Generator) -> None:
    q = NF4Array.quantize(rng.standard_normal((4, 64)), 32, True)
    assert {q.nested_absmax.dtype, q.nested_code.dtype, q.nested_offset.dtype} == {F64}  # type: ignore[union-attr]


@pytest.mark.parametrize("double", [False, True])
def test_launchers_get_arrays_constants_and_parameters(double: bool, rng: np.random.Generator) -> None:
    q = NF4Array.quantize(weight(rng, (64, 128)), 128, double)
    assert list(q.arrays()) == ["packed", "absmax", "nested_absmax", "nested_code", "nested_offset"]
    there = [a for a in q.arrays().values() if a is not None]
    assert len(there) == (5 if double else 2) and q.nbytes == sum(a.nbytes for a in there)
    assert q.variant == ("nf4_nested" if double else "nf4") and q.value_dtype == "float32"
    assert q.parameters() == (7, 8) and q.constants()["NESTED"] is double and q.constants()["ROUND"] == 0
    assert [q.constants()[f"LEVEL_{i}"] for i in range(16)] == LEVELS.tolist()
    moved = q.map_arrays(lambda array: array.copy())
    assert moved.shape == q.shape and moved.block_size == 128 and moved.packed is not q.packed
    np.testing.assert_array_equal(moved.rows(0, 64, F32), q.rows(0, 64, F32))


@pytest.mark.parametrize("double", [False, True])
def test_rules_hold_for_what_is_quantized_and_name_what_is_wrong(double: bool, rng: np.random.Generator) -> None:
    q = NF4Array.quantize(weight(rng, (41, 123)), 64, double)
    assert all(holds for holds, _ in q.rules())
    for name, size, dtype in q.layout():
        array = q.arrays()[name]
        assert array is not None and array.size == size and array.dtype == {"u8": np.uint8, "f32": F32}[dtype]
    assert {name for name, _, _ in q.layout()} | {"packed"} == {n for n, a in q.arrays().items() if a is not None}
    wrong = dataclasses.replace(q, block_size=48, value_dtype="int8", packed=q.packed[1:])
    assert [text for holds, text in wrong.rules() if not holds] == [
        f"block_size must be one of {BLOCK_SIZES}, got 48",
        "value_dtype must be one of ('float32', 'float16', 'bfloat16'), got 'int8'",
        "packed must hold 2522 bytes for shape [41, 123], got 2521",
    ]
    assert [h for h, _ in NF4Array.quantize_rules(48, double)] == [False]
    assert [h for h, _ in NF4Array.quantize_rules(64, double)] == [True]


def test_formats_are_found_by_name() -> None:
    assert formats()["nf4"] is NF4Array and all(name == kind.format for name, kind in formats().items())
