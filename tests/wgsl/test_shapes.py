"""Any shape at all: memory-bound operators on wgpu against float64, shapes and contents drawn by hypothesis."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.case_results import assert_case
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.case import Case, Inputs, Outputs

# The fixture holds one device for all examples, which is what is wanted; the same examples each time.
run_shapes = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
rows, columns, seeds = st.integers(1, 300), st.integers(1, 700), st.integers(0, 2**32 - 1)
dtypes = st.sampled_from([np.float32, np.float16])


def check(device: Any, call: Any, inputs: Inputs, backward: bool, ulps: float) -> None:
    direction = "backward" if backward else "forward"
    assert_case(Case("", "", direction, "", "", lambda _: inputs, call, ulps), device)


def available(device: Any, dtype: Any) -> Any:
    return dtype if device.float16 else np.float32


@run_shapes
@given(rows, columns, seeds, dtypes)
def test_rms_norm_of_any_shape_is_within_the_limits(wgpu_device, r, c, seed, dtype) -> None:
    rng, dtype = np.random.default_rng(seed), available(wgpu_device, dtype)
    x, dy = (rng.standard_normal((r, c)).astype(dtype) for _ in range(2))
    weight = (1 + 0.2 * rng.standard_normal(c)).astype(np.float32)
    rstd = ReferenceDevice().rms_norm(x, weight, 1e-5)[1]

    def forward(d: Any, a: Inputs) -> Outputs:
        return dict(zip(("y", "rstd"), d.rms_norm(a["x"], a["weight"], 1e-5)))

    def backward(d: Any, a: Inputs) -> Outputs:
        return dict(zip(("dx", "dw"), d.rms_norm_backward(a["dy"], a["x"], a["weight"], a["rstd"])))

    inputs = {"x": x, "dy": dy, "weight": weight, "rstd": rstd}
    check(wgpu_device, forward, inputs, False, 4)
    check(wgpu_device, backward, inputs, True, 4 + r**0.5)


@run_shapes
@given(rows, columns, seeds, dtypes)
def test_row_operators_of_any_shape_are_within_the_limits(wgpu_device, r, c, seed, dtype) -> None:
    rng, dtype = np.random.default_rng(seed), available(wgpu_device, dtype)
    inputs = {"x": rng.standard_normal((r, c)).astype(dtype), "b": rng.standard_normal(c).astype(np.float32)}
    inputs["g"] = inputs["x"].astype(np.float32).reshape(-1)

    def call(d: Any, a: Inputs) -> Outputs:
        x = a["x"]
        found = {"softmax": d.softmax(x), "sum_rows": d.sum_rows(x), "sum": d.sum(x), "norm": d.grad_norm(a["g"])}
        return {**found, "bias": d.bias(x, a["b"]), "swiglu": d.swiglu(x, x), "silu": d.silu(x)}

    check(wgpu_device, call, inputs, False, 16 + r**0.5)


@run_shapes
@given(st.integers(1, 90), st.integers(1, 12), st.integers(1, 70), seeds, dtypes)
def test_rope_of_any_shape_is_within_the_limits(wgpu_device, n, heads, half, seed, dtype) -> None:
    rng, dtype = np.random.default_rng(seed), available(wgpu_device, dtype)
    inputs = {
        "x": rng.standard_normal((n, heads, 2 * half)).astype(dtype),
        "cos": rng.standard_normal((37, half)).astype(np.float32),
        "sin": rng.standard_normal((37, half)).astype(np.float32),
        "positions": rng.integers(0, 37, n).astype(np.int32),
    }
    for inverse in (False, True):
        check(
            wgpu_device,
            lambda d, a, inverse=inverse: {"y": d.rope(a["x"], a["cos"], a["sin"], a["positions"], inverse=inverse)},
            inputs,
            False,
            4,
        )


@run_shapes
@given(rows, columns, st.sampled_from([32, 64, 128, 1024, 4096]), seeds)
def test_nf4_of_any_shape_equals_the_reference(wgpu_device, r, c, block_size, seed) -> None:
    w = np.random.default_rng(seed).standard_normal((r, c)).astype(np.float32)
    reference = ReferenceDevice()
    found = wgpu_device.dequantize(wgpu_device.quantize(wgpu_device.upload(w), block_size))
    wanted = reference.dequantize(reference.quantize(w, block_size))
    np.testing.assert_array_equal(wgpu_device.download(found), wanted)


@run_shapes
@given(st.integers(1, 400), st.integers(1, 200), st.integers(1, 300), seeds)
def test_embedding_of_any_shape_is_within_the_limits(wgpu_device, vocab, width, n, seed) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocab, n).astype(np.int32)
    inputs = {"table": rng.standard_normal((vocab, width)).astype(np.float32), "ids": ids}
    inputs["dy"] = rng.standard_normal((n, width)).astype(np.float32)

    def call(d: Any, a: Inputs) -> Outputs:
        return {"y": d.embedding(a["table"], a["ids"]), "dtable": d.embedding_backward(a["dy"], a["ids"], vocab)}

    check(wgpu_device, call, inputs, True, 4 + n**0.5)
