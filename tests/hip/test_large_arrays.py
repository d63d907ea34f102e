"""Arrays of more than 2^32 elements: of each launch the emulated GPU runs the last work-group alone, whose elements
lie where an index of 32 bits would have wrapped around. The memory before them is never touched, and takes none."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from wgrad.device.formats.nf4 import NF4Array

F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
BEYOND = (1 << 32) + 2048 + 1501  # elements; the last 1,501 are one work-group's

SMALL = 64 << 20  # bytes: larger arrays of the emulated GPU start as zeros, others as NaN


@pytest.fixture
def device(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("WGRAD_EMULATED_MEMORY", str(1 << 40))
    monkeypatch.setenv("WGRAD_EMULATED_GROUPS", "last")
    made = emulator.new("gfx942")
    yield made
    emulator.clear()
    gc.collect()
    made.trim()  # the GPU is as small as before, for other tests


def numbers(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape).astype(dtype)


def zeros(device: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    array = device.empty(shape, dtype)
    if array.nbytes <= SMALL:
        device.write(array, np.zeros(shape, dtype))
    return array


def ending_in(device: Any, shape: tuple[int, ...], end: np.ndarray) -> Any:
    """Zeros of this shape, but for the last elements, which are those of `end`."""
    array = zeros(device, shape, end.dtype)
    device.write(device.view(array, end.shape, array.size - end.size), end)
    return array


def end_of(device: Any, array: Any, *shape: int) -> np.ndarray:
    return device.download(device.view(array, shape, array.size - int(np.prod(shape)))).astype(np.float64)


def near(found: np.ndarray, wanted: Any) -> None:
    np.testing.assert_allclose(found, np.asarray(wanted, np.float64), rtol=4e-3, atol=4e-3)


def test_elements_are_computed_to_the_last(device: Any) -> None:
    end = numbers(1000, dtype=F16)
    wide = end.astype(np.float64)
    x, y = (ending_in(device, (BEYOND,), end) for _ in range(2))
    near(end_of(device, device.add(x, y), 1000), 2 * wide)
    near(end_of(device, device.mul(x, y), 1000), wide**2)
    near(end_of(device, device.cast(x, F32), 1000), wide)
    near(end_of(device, device.softcap(x, 2.0), 1000), 2 * np.tanh(wide / 2))
    near(end_of(device, device.swiglu(x, y), 1000), wide / (1 + np.exp(-wide)) * wide)
    out = device.empty((BEYOND,), F16)
    device.copy(x, out)
    near(end_of(device, out, 1000), wide)
    device.fill(out, 3.0)
    near(end_of(device, out, 1000), np.full(1000, 3.0))
    keep = ending_in(device, (BEYOND,), np.arange(1000, dtype=np.uint32) % 2)
    near(end_of(device, device.mask(x, keep, 7.0), 1000), np.where(np.arange(1000) % 2, wide, 7))


@pytest.mark.parametrize("columns", [1000, 1003])
def test_rows_are_computed_to_the_last(device: Any, columns: int) -> None:
    rows = BEYOND // columns + 1
    end = numbers(columns, dtype=F16)
    wide, weight = end.astype(np.float64), numbers(columns)
    x, w = ending_in(device, (rows, columns), end), device.upload(weight)
    near(end_of(device, device.bias(x, w), columns), wide + weight)
    norm = wide / np.sqrt((wide**2).mean() + 1e-5)
    near(end_of(device, device.rms_norm(x, w, eps=1e-5)[0], columns), norm * weight)
    normal = (wide - wide.mean()) / np.sqrt(wide.var() + 1e-5)
    near(end_of(device, device.layer_norm(x, w, device.upload(0 * weight), eps=1e-5)[0], columns), normal * weight)
    near(end_of(device, device.softmax(x), columns), np.exp(wide) / np.exp(wide).sum())


def test_rows_by_number_are_reached_to_the_last(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table, and a cache, whose last rows lie beyond."""
    monkeypatch.delenv("WGRAD_EMULATED_GROUPS")
    rows, groups, width = BEYOND // 1024, 8, 128
    end = numbers(1024, dtype=F16)
    table = ending_in(device, (rows, 1024), end)
    ids = device.upload(np.array([rows - 1], np.int32))
    near(end_of(device, device.embedding(table, ids), 1024), end)
    new = numbers(2, groups, width, dtype=F16)
    at = device.upload(np.array([rows - 2], np.int32))
    keys, values = (device.empty((1, rows, groups, width), F16) for _ in range(2))
    device.kv_append(values, device.view(device.upload(new), (1, 2, groups, width)), at)
    near(end_of(device, values, 2, groups, width), new)
    still = device.upload(np.ones((9, width // 2), F32)), device.upload(np.zeros((9, width // 2), F32))
    positions = device.upload(np.array([3, 4], np.int32))
    device.rope_append(device.upload(new), device.upload(-new), *still, positions, keys, values, at)
    near(end_of(device, keys, 2, groups, width), new)
    near(end_of(device, values, 2, groups, width), -new)


def test_rope_reaches_the_last_token(device: Any) -> None:
    tokens, heads, width = BEYOND // 1024, 8, 128
    end = numbers(width, dtype=F16)
    x = ending_in(device, (tokens, heads, width), end)
    angle = numbers(9, width // 2)
    positions = ending_in(device, (tokens,), np.array([5], np.int32))
    a, b = np.split(end.astype(np.float64), 2)
    c, s = np.cos(angle)[5], np.sin(angle)[5]
    wanted = np.concatenate([a * c - b * s, b * c + a * s])
    y = device.rope(x, device.upload(np.cos(angle)), device.upload(np.sin(angle)), positions)
    near(end_of(device, y, width), wanted)


def corner(device: Any, values: np.ndarray, dtype: Any, lines: int, length: int, across: bool) -> Any:
    """An operand [lines, length] of zeros ([length, lines] where across) whose last lines end in `values`."""
    count, depth = values.shape
    array = zeros(device, (length, lines) if across else (lines, length), dtype)
    some = values.T if across else values
    for number, row in enumerate(some.astype(dtype)):
        left = len(some) - number
        at = array.size - left * array.shape[1] + array.shape[1] - len(row)
        device.write(device.view(array, row.shape, at), row)
    return array


@pytest.mark.parametrize("dtypes", [(F16, F16), (F32, F32), (F16, BF16), (F32, F16)], ids=str)
@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("mnk", [(BEYOND // 4096, 4104, 72), (BEYOND // 1024, 72, 1024), (72, BEYOND // 1024, 1024)])
def test_matmuls_reach_the_last_element(device: Any, dtypes: Any, layout: str, mnk: tuple[int, int, int]) -> None:
    """The result, a or b goes beyond."""
    m, n, k = (x // 8 * 8 + 8 for x in mnk)
    left, right = numbers(8, 24), numbers(8, 24)[::-1]
    a = corner(device, left, dtypes[0], m, k, layout[0] == "t")
    b = corner(device, right, dtypes[1], n, k, layout[1] == "n")
    y = device.gemm(a, b, trans_a=layout[0] == "t", trans_b=layout[1] == "t", dtype=F32)
    found = np.stack([end_of(device, device.view(y, (m - i, n)), 8) for i in range(7, -1, -1)])
    near(found, left.astype(dtypes[0]).astype(np.float64) @ right.astype(dtypes[1]).astype(np.float64).T)


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_one_row_reaches_the_end_of_the_weight(device: Any, dtype: Any) -> None:
    """The weight has more elements than 32 bits can index."""
    x, end = numbers(1, 1024, dtype=dtype), numbers(1024, dtype=dtype)
    y = device.gemm(device.upload(x), ending_in(device, (BEYOND // 8192 * 8, 1024), end), trans_b=True, dtype=F32)
    near(end_of(device, y, 1), [x[0].astype(np.float64) @ end.astype(np.float64)])


@pytest.mark.parametrize(("layout", "wide"), [("nt", "m"), ("nn", "m"), ("tn", "m"), ("tn", "n")])
def test_short_sides_are_multiplied_to_the_last_element(device: Any, layout: str, wide: str) -> None:
    """Short sides have 16 elements, as LoRA's have; the other operand is larger than 32 bits can index."""
    long = BEYOND // 8192 * 8
    m, n, k = (long, 16, 1024) if wide == "m" else (16, long, 1024)
    left, right = numbers(8, 24), numbers(8, 24)[::-1]
    a = corner(device, left, F32, m, k, layout[0] == "t")
    b = corner(device, right, F32, n, k, layout[1] == "n")
    y = device.gemm(a, b, trans_a=layout[0] == "t", trans_b=layout[1] == "t", dtype=F32)
    found = np.stack([end_of(device, device.view(y, (m - i, n)), 8) for i in range(7, -1, -1)])
    near(found, left.astype(np.float64) @ right.astype(np.float64).T)


@pytest.mark.parametrize("double", [False, True])
def test_quantize_reaches_the_last_block(device: Any, double: bool) -> None:
    """Codes and their scales of the end; as without double quantization, whose mean would be one of all blocks."""
    end = numbers(8, 1024)
    x = ending_in(device, (BEYOND // 1024, 1024), end)
    wanted, found = NF4Array.quantize(end), device.quantize(x)
    np.testing.assert_array_equal(end_of(device, found.packed, 512), wanted.packed.ravel()[-512:])
    np.testing.assert_array_equal(end_of(device, found.absmax, 16), wanted.absmax.ravel()[-16:])
    rows = end_of(device, device.dequantize(found, F32), 1024)
    near(rows, wanted.rows(7, 8, F32).ravel())


def two_at_the_end(device: Any, shape: tuple[int, int], nested: bool) -> NF4Array:
    """A weight of zeros, but for the last 64 elements: each 2."""
    size = shape[0] * shape[1]
    packed = ending_in(device, (size // 2,), np.full(32, 255, np.uint8))  # level 1
    if not nested:
        return NF4Array(packed, ending_in(device, (size // 64,), np.array([2], np.float32)), shape, 64)
    codes = ending_in(device, (size // 64,), np.array([255], np.uint8))
    table = np.concatenate([np.zeros(255), [1]]).astype(np.float32)
    scales = ending_in(device, (-(-size // 64 // 256),), np.array([2], np.float32))
    return NF4Array(packed, codes, shape, 64, scales, device.upload(table), device.zeros((1,)))


@pytest.mark.parametrize("dtypes", [(F16, F16), (F32, F32), (F16, F32), (F32, F16)], ids=str)
@pytest.mark.parametrize("nested", [False, True])
def test_frozen_weights_are_decoded_to_the_end(device: Any, dtypes: Any, nested: bool) -> None:
    """As many elements as a kernel decodes: a few less than 2^32; forward and backward."""
    most = (1 << 32) - 1
    long, wide = most // 512 // 8 * 8, most // 72 // 64 * 64
    x = numbers(72, 512, dtype=dtypes[0])
    y = device.linear_quantized(device.upload(x), two_at_the_end(device, (long, 512), nested), dtype=dtypes[1])
    near(end_of(device, y, 1)[0], 2 * x[-1, -64:].astype(np.float64).sum())
    dy = numbers(72, 72, dtype=dtypes[0])
    dx = device.linear_quantized_backward(
        device.upload(dy), two_at_the_end(device, (72, wide), nested), dtype=dtypes[1]
    )
    near(end_of(device, dx, 64), np.full(64, 2 * dy[-1, -1].astype(np.float64)))
