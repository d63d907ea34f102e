"""Arrays of one call that each have another dtype: none is read or written as if it had another's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.formats.nf4 import PART_ROWS, NF4Array

F32, F16, BF16 = (np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16))
IDS = np.array([[0, 1], [1, 0], [0, 1], [1, 0], [0, 1]], np.int32)


def few(*shape: int, dtype: Any = F32) -> np.ndarray:
    """Integers, so that every dtype holds them and their sums are exact."""
    return np.random.default_rng(sum(shape)).integers(-3, 4, shape).astype(dtype)


def compare(hip_device: Any, call: Any, limit: float = 0.0) -> None:
    """Compare a call's results with NumPy's. call: from a device and `upload` to arrays."""
    devices = hip_device, ReferenceDevice()
    found, wanted = ([d.download(a) for a in call(d, d.upload) if a is not None] for d in devices)
    assert [a.dtype for a in found] == [a.dtype for a in wanted]
    for mine, true in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine.astype(np.float64), true.astype(np.float64), rtol=limit, atol=limit)


@pytest.mark.parametrize(("dy", "x", "residual", "dx"), [(F32, F16, BF16, F32), (BF16, F32, F16, BF16)])
def test_gradients_of_norms(hip_device: Any, dy: Any, x: Any, residual: Any, dx: Any) -> None:
    def call(d: Any, up: Any) -> Any:
        given, rows, weight = up(few(5, 35, dtype=dy)), up(few(5, 35, dtype=x)), up(few(35) + 4)
        rstd = d.rms_norm(rows, weight, 1e-5)[1]
        yield from d.rms_norm_backward(
            given, rows, weight, rstd, residual_grad=up(few(5, 35, dtype=residual)), dtype=dx
        )
        statistics = d.layer_norm(rows, weight, weight, 1e-5)[1:]
        yield from d.layer_norm_backward(given, rows, weight, *statistics, dtype=dx)

    compare(hip_device, call, limit=1e-2)


@pytest.mark.parametrize(("dsum", "y"), [(F32, F16), (F16, F32)])
def test_gradients_of_combined_experts(hip_device: Any, dsum: Any, y: Any) -> None:
    def call(d: Any, up: Any) -> Any:
        order = d.group_by_expert(up(IDS), 2)[1]
        return d.combine_backward(up(few(5, 13, dtype=dsum)), up(few(10, 13, dtype=y)), order, up(few(5, 2)))

    compare(hip_device, call)


@pytest.mark.parametrize(
    ("x", "weight", "add", "made"),
    [(F32, F32, F16, F32), (F16, F16, F32, F16), (F16, F16, BF16, F32), (BF16, F16, F16, F32)],
)
@pytest.mark.parametrize("columns", [8, 7])
def test_grouped_gemms(hip_device: Any, x: Any, weight: Any, add: Any, made: Any, columns: int) -> None:
    """The gradients are scaled too."""

    def call(d: Any, up: Any) -> Any:
        start = d.group_by_expert(up(IDS), 2)[0]
        rows, w, more = up(few(10, 8, dtype=x)), up(few(2, columns, 8, dtype=weight)), up(few(10, columns, dtype=add))
        yield d.grouped_linear(rows, w, start, add=more, alpha=0.5, dtype=made)
        yield d.grouped_linear_backward(up(few(10, columns, dtype=add)), w, start, alpha=0.5, dtype=made)
        yield d.grouped_weight_grad(up(few(10, columns, dtype=add)), rows, start, alpha=0.5)
        yield d.grouped_weight_grad(rows, up(few(10, columns, dtype=add)), start)

    compare(hip_device, call)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize(("u", "v", "residual", "made"), [(F16, F32, BF16, F32), (F32, BF16, F32, F16)])
def test_terms_of_a_gemm(hip_device: Any, rows: int, u: Any, v: Any, residual: Any, made: Any) -> None:
    """A low-rank term of more ranks than a work-group has work-items."""

    def call(d: Any, up: Any) -> Any:
        lowrank = up(few(rows, 300, dtype=u)), up(few(12, 300, dtype=v))
        more = {"lowrank": lowrank, "residual": up(few(rows, 12, dtype=residual)), "alpha": 0.5, "dtype": made}
        yield d.gemm(up(few(rows, 40, dtype=F16)), up(few(12, 40, dtype=F16)), trans_b=True, **more)

    compare(hip_device, call)


def test_gradients_through_a_stack_are_added_in_float32(hip_device: Any) -> None:
    """2,049 lies between two numbers of float16."""
    d = hip_device
    weights = [d.quantize(d.upload(np.ones((PART_ROWS, 64), np.float32)), 64, double=True) for _ in range(2)]
    stack = NF4Array.stack(weights, d, one_code=True)
    dy = np.zeros((3, 2 * PART_ROWS), np.float16)
    dy[:, 0], dy[:, 1], dy[:, PART_ROWS] = 2048, 1, -2048
    np.testing.assert_array_equal(d.download(d.linear_quantized_backward(d.upload(dy), stack)), np.ones((3, 64), F16))


@pytest.mark.parametrize("rounded", ["float32", "bfloat16"])
@pytest.mark.parametrize("made", [F32, F16])
def test_decoded_weights_are_rounded_as_they_say(hip_device: Any, rounded: str, made: Any) -> None:
    """Each row of x chooses an element of every row of a weight, or a row of it."""
    d, start = hip_device, hip_device.upload(np.array([0, 4, 9], np.int32))
    weight = d.quantize(d.upload(np.random.default_rng(2).standard_normal((14, 64)).astype(np.float32)), 64)
    weight = replace(weight, value_dtype=rounded)
    values = d.download(d.dequantize(weight, F32)).reshape(2, 7, 64)
    experts, columns = (np.arange(9) > 3).astype(int), np.arange(9) * 7
    x, dy = (d.upload(np.eye(n, dtype=F16)[columns % n]) for n in (64, 7))
    of_columns, of_rows = values[experts, :, columns].astype(made), values[experts, columns % 7].astype(made)
    np.testing.assert_array_equal(d.download(d.grouped_linear(x, weight, start, dtype=made)), of_columns)
    np.testing.assert_array_equal(d.download(d.grouped_linear_backward(dy, weight, start, dtype=made)), of_rows)
    found = d.download(d.linear_quantized(x, weight, dtype=made))
    limit = 1e-6 if made == F32 else 0  # float32 goes through tensor cores in pieces
    np.testing.assert_allclose(found, values.reshape(14, 64).T[columns].astype(made), rtol=limit)
