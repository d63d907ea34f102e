"""Terms that are added to a GEMM, with splits of K and batches; rounding of decoded weights; codes at thresholds."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from wgrad.device.formats.nf4 import LEVELS, NF4Array, dynamic_map, thresholds

F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
M, N, K = 41, 136, 1064  # K is worth four splits


def normal(seed: int, *shape: int, dtype: Any = F32) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) + 0.1).astype(dtype)


def terms(rank: int, layout: str, residual: Any = F16) -> dict[str, np.ndarray]:
    """Larger than the product: one added twice, or to a wrong place, is seen."""
    v = (N, rank) if layout == "nt" else (rank, N)
    return {
        "u": 40 * normal(3, M, rank),
        "v": normal(4, *v),
        "bias": 40 * normal(5, N),
        "residual": 40 * normal(6, M, N, dtype=residual),
    }


@pytest.mark.parametrize("rank", [1, 5])
@pytest.mark.parametrize("layout", ["nt", "nn"])
@pytest.mark.parametrize("dtypes", [(F16, F16), (BF16, BF16), (F32, F32), (F32, BF16)], ids=str)
def test_splits_add_every_term_once(
    hip_device: Any, compare: Any, launched: list[tuple[str, str]], dtypes: Any, layout: str, rank: int
) -> None:
    inputs = {"a": normal(1, M, K, dtype=dtypes[0]), **terms(rank, layout)}
    inputs["b"] = normal(2, *((N, K) if layout == "nt" else (K, N)), dtype=dtypes[1])
    inputs["c"] = 40 * normal(7, M, N)

    def call(device: Any, x: Any) -> Any:
        more = {"lowrank": (x["u"], x["v"]), "bias": x["bias"], "residual": x["residual"], "out": x["c"]}
        return {"y": device.gemm(x["a"], x["b"], trans_b=layout == "nt", alpha=0.5, accumulate=True, **more)}

    compare(hip_device, call, inputs)
    assert launched[-1] == ("gemm_f32", "gemm_reduce")


@pytest.mark.parametrize("rank", [1, 5])
@pytest.mark.parametrize("dtypes", [(F16, F16), (F32, F32), (F16, F32), (F32, F16)], ids=str)
def test_splits_of_a_frozen_weight_add_every_term_once(
    hip_device: Any, compare: Any, launched: list[tuple[str, str]], dtypes: Any, rank: int
) -> None:
    x_type, y_type = dtypes
    weight = NF4Array.quantize(normal(2, N, 1088), double=True)
    inputs = {"x": normal(1, M, 1088, dtype=x_type), "weight": weight, **terms(rank, "nt")}

    def call(device: Any, x: Any) -> Any:
        more = {"lowrank": (x["u"], x["v"]), "bias": x["bias"], "residual": x["residual"]}
        return {"y": device.linear_quantized(x["x"], x["weight"], **more, dtype=y_type)}

    compare(hip_device, call, inputs)
    assert launched[-1] == ("gemm_f32", "gemm_reduce")


@pytest.mark.parametrize(("n", "k"), [(136, 72), (136, 67), (133, 72)])
@pytest.mark.parametrize("dtypes", [(F16, F16), (F32, F32), (F16, F32), (F32, BF16)], ids=str)
@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
def test_each_batch_accumulates_onto_its_own_result(
    hip_device: Any, compare: Any, dtypes: Any, layout: str, n: int, k: int
) -> None:
    """Each has its operands, its result and what was there; more results than a tile has, four at a time and one."""
    shape_a, shape_b = (3, 40, k), (3, k, n)
    a = normal(1, *(shape_a if layout[0] == "n" else (3, k, 40)), dtype=dtypes[0])
    b = normal(2, *(shape_b if layout[1] == "n" else (3, n, k)), dtype=dtypes[1])

    def call(device: Any, x: Any) -> Any:
        options: dict[str, Any] = {
            "trans_a": layout[0] == "t",
            "trans_b": layout[1] == "t",
            "accumulate": True,
        }
        return {"y": device.gemm(x["a"], x["b"], out=x["c"], **options)}

    compare(hip_device, call, {"a": a, "b": b, "c": 40 * normal(3, 3, 40, n)})


@pytest.mark.parametrize("x_type", [F16, BF16], ids=str)
@pytest.mark.parametrize("rows", [1, 40])
def test_decoded_weights_round_to_nearest_even(hip_device: Any, x_type: Any, rows: int) -> None:
    """Weights get 16 bits where x and the result have them: absmax at ties and next to them, times 1. One row, which
    takes the kernel that rounds no weight, rounds the result."""
    step = 2.0**-8 if x_type == BF16 else 2.0**-11
    absmax = np.float32(1) + step * np.array([1, 3, 5, 0.999, 1.001, 2.999, 3.001, 0, 2, 4], np.float32)
    weight = NF4Array.quantize(np.eye(64, dtype=np.float32)[: len(absmax)] * absmax[:, None], block_size=64)
    np.testing.assert_array_equal(weight.absmax.ravel(), absmax)
    x = np.zeros((rows, 64), x_type)
    for i in range(len(absmax)):
        x[i % rows, i] = 1
    y = hip_device.linear_quantized(hip_device.upload(x), weight.map_arrays(hip_device.upload), dtype=x_type)
    found = hip_device.download(y).astype(np.float32)
    wanted = absmax.astype(x_type).astype(np.float32)
    np.testing.assert_array_equal(found[np.arange(len(absmax)) % rows, np.arange(len(absmax))], wanted)


@pytest.mark.parametrize("double", [False, True])
def test_codes_of_ties_are_the_lower(hip_device: Any, double: bool) -> None:
    """A tie takes the lower code; just above it the higher."""
    limits = thresholds(LEVELS)
    row = np.concatenate(
        [limits, np.nextafter(limits, np.float32(2)), np.nextafter(limits, np.float32(-2)), [1, -1, 0]]
    )
    x = np.resize(row, 64 * 8).astype(np.float32).reshape(8, 64)
    x[:, 0] = 1  # absmax
    wanted, found = NF4Array.quantize(x, 64, double), hip_device.quantize(hip_device.upload(x), 64, double=double)
    np.testing.assert_array_equal(hip_device.download(found.packed), wanted.packed)
    codes = wanted.packed.ravel()
    np.testing.assert_array_equal((codes[0] >> 4, codes[1] >> 4), (15, 2))  # of x[0, 0] and of x[0, 2], a tie


def test_nested_codes_of_ties_are_the_lower(hip_device: Any) -> None:
    """By the kernel itself: the mean, which is subtracted first, would leave no value on a threshold."""
    limits = thresholds(dynamic_map())
    near = np.concatenate([limits, np.nextafter(limits, np.float32(2)), np.nextafter(limits, np.float32(-2))])
    values = np.resize(near[np.abs(near) < 1], 4 * 256 - 7)
    values[::256] = 1  # the largest of each block
    d = hip_device
    codes, peaks = d.zeros((values.size,), np.uint8), d.zeros((4,))
    arguments = [d.upload(values), d.zeros((1,)), d.upload(limits), codes, peaks, values.size]
    d.launch("quantize", "nf4_nest", arguments, (4, 1, 1))
    np.testing.assert_array_equal(d.download(codes), np.searchsorted(limits, values, side="left"))
    np.testing.assert_array_equal(d.download(peaks), np.ones(4))
