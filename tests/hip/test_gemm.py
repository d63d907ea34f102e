"""The products on the emulated GPU: mixed dtypes, the kernels for LoRA and decoding, alignment, wrong use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.device.test_gguf_formats import any_blocks, shape_of
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.case import Inputs, Outputs
from wgrad.device.errors import DeviceError
from wgrad.device.formats.frozen_weight import gguf_formats
from wgrad.hip.gemm.gemm import UNALIGNED, gpu_of

F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


def normal(seed: int, shape: tuple[int, ...], dtype: Any = F32) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) + 0.1).astype(dtype)


def gemm_call(**options: Any) -> Callable[[Any, Inputs], Outputs]:
    def call(device: Any, x: Inputs) -> Outputs:
        lowrank = (x["u"], x["v"]) if "u" in x else None
        more = {name: x[name] for name in ("bias", "residual") if name in x}
        return {"y": device.gemm(x["a"], x["b"], lowrank=lowrank, **more, **options)}

    return call


def names(device: Any, call: Callable[[], Any]) -> list[str]:
    with device.capture() as recorded:
        call()
    return recorded.names


@pytest.mark.parametrize("dtypes", [(F32, F32), (F16, F32), (F32, F16), (BF16, F32)], ids=str)
@pytest.mark.parametrize(
    "layout, m, n, k",
    [("nt", 133, 5, 264), ("nn", 133, 40, 72), ("nt", 5, 64, 328), ("tn", 8, 136, 333), ("tn", 136, 24, 333)],
)
def test_skinny_matmuls_with_every_term_are_within_the_limits(
    hip_device: Any, compare: Any, dtypes: tuple[Any, Any], layout: str, m: int, n: int, k: int
) -> None:
    """One short side, with everything that can be added, split over K where that is long."""
    a = normal(1, (k, m) if layout[0] == "t" else (m, k), dtypes[0])
    b = normal(2, (n, k) if layout[1] == "t" else (k, n), dtypes[1])
    inputs = {"a": a, "b": b, "bias": normal(3, (n,)), "residual": normal(4, (m, n), F16), "u": normal(5, (m, 3))}
    inputs["v"] = normal(6, (n, 3) if layout[1] == "t" else (3, n))
    options: dict[str, Any] = {
        "trans_a": layout[0] == "t",
        "trans_b": layout[1] == "t",
        "alpha": 0.5,
        "dtype": F32,
    }
    compare(hip_device, gemm_call(**options), inputs)
    x, y = hip_device.upload(a), hip_device.upload(b)
    width = 16 if min(m if layout == "tn" else n, n) <= 16 else 64
    assert names(hip_device, lambda: hip_device.gemm(x, y, **options))[0] == f"gemm_skinny_{layout}_{width}"


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (F16, BF16), (BF16, F16), (F32, BF16), (BF16, F32)], ids=str)
@pytest.mark.parametrize(
    "layout, m, n, k", [("nn", 70, 136, 40), ("nt", 3, 131, 72), ("tn", 72, 136, 37), ("nt", 1, 131, 72)]
)
def test_bfloat16_matmuls_are_within_the_limits(
    hip_device: Any, compare: Any, dtypes: tuple[Any, Any], layout: str, m: int, n: int, k: int
) -> None:
    a = normal(1, (k, m) if layout[0] == "t" else (m, k), dtypes[0])
    b = normal(2, (n, k) if layout[1] == "t" else (k, n), dtypes[1])
    compare(hip_device, gemm_call(trans_a=layout[0] == "t", trans_b=layout[1] == "t", dtype=F32), {"a": a, "b": b})


@pytest.mark.parametrize("layout, m, n, k", [("nt", 133, 136, 72), ("nn", 3, 72, 1064), ("nt", 300, 67, 40)])
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_weights_in_pieces_are_as_exact_as_float32(
    emulator: Any, compare: Any, dtype: Any, layout: str, m: int, n: int, k: int
) -> None:
    """bfloat16 weights on 16-bit tensor cores, with nothing lost of the other operand: as exact as float32."""
    device = emulator.device("gfx942")
    a, b = normal(1, (m, k), dtype), normal(2, (n, k) if layout == "nt" else (k, n), BF16)
    trans_b = layout == "nt"
    compare(device, gemm_call(trans_b=trans_b, alpha=0.5, dtype=F32), {"a": a, "b": b, "bias": normal(3, (n,))})
    x, y = device.upload(a), device.upload(b)
    short = "f32" if dtype == F32 else "f16"
    assert names(device, lambda: device.gemm(x, y, trans_b=trans_b))[0] == f"gemm_split_{short}_bf16_{layout}"


@pytest.mark.parametrize(
    "dtype, offset, kernel",
    [(F16, 1, "gemm_f16_nt_unaligned"), (F16, 4, "gemm_f16_nt_unaligned"), (F32, 1, "gemm_any_nt"), (F16, 8, None)],
)
def test_views_that_start_anywhere_are_read(hip_device: Any, dtype: Any, offset: int, kernel: str | None) -> None:
    """A view off by an element takes a kernel that reads it so; out, bias and residual too, each by itself."""
    m, n, k = 40, 72, 64
    a, b = normal(1, (m, k), dtype), normal(2, (n, k), dtype)

    def shifted(x: np.ndarray) -> Any:
        memory = hip_device.upload(np.concatenate([np.full(offset, np.nan, x.dtype), x.ravel()]))
        return hip_device.view(memory, x.shape, offset)

    inputs = {"a": a, "b": b, "bias": normal(3, (n,)), "residual": normal(4, (m, n), F16), "out": np.zeros((m, n), F32)}

    def product(*views: str) -> np.ndarray:
        x = {name: (shifted if name in views else hip_device.upload)(value) for name, value in inputs.items()}
        with hip_device.capture() as recorded:
            found = hip_device.gemm(x.pop("a"), x.pop("b"), trans_b=True, **x)
        layout, values = recorded._launches[-1].packed
        flags = layout.struct.unpack(values)[-4]  # before alpha and two strides
        assert bool(flags & UNALIGNED) == any(array.address % 16 for array in x.values())
        return hip_device.download(found)

    wanted = product()
    for views in (inputs, *((name,) for name in inputs)):
        np.testing.assert_allclose(product(*views), wanted, rtol=2e-6, atol=2e-6, err_msg=str(views))
    left, right = shifted(a), shifted(b)
    chosen = names(hip_device, lambda: hip_device.gemm(left, right, trans_b=True))[0]
    assert chosen == kernel if kernel else "unaligned" not in chosen


def test_plans_are_for_the_gpu_as_it_is(emulator: Any) -> None:
    device = emulator.device("gfx942")
    with device.planned_for(7):
        assert gpu_of(device).compute_units == 7
    assert gpu_of(device).compute_units == device.compute_units != 7
    assert [gpu_of(emulator.device(name)).flushes_denormals for name in ("gfx942", "gfx90a")] == [False, True]


def test_one_row_is_multiplied_by_any_format_without_decoding_it_first(hip_device: Any) -> None:
    """Forward; more rows, and a row's gradient, have kernels of few formats."""
    data = any_blocks("Q4_K", np.random.default_rng(7), 8)
    host = gguf_formats()["Q4_K"].from_gguf(data, shape_of("Q4_K", data))
    weight = host.map_arrays(hip_device.upload)
    rows, columns = host.shape
    values = hip_device.dequantize(weight)
    x, dy = hip_device.upload(normal(1, (1, columns))), hip_device.upload(normal(2, (1, rows)))
    assert names(hip_device, lambda: hip_device.linear_quantized(x, weight)) == ["gemv_q4_k"]
    for found, wanted in (
        (hip_device.linear_quantized(x, weight), hip_device.gemm(x, values, trans_b=True)),
        (hip_device.linear_quantized_backward(dy, weight), hip_device.gemm(dy, values)),
    ):
        np.testing.assert_allclose(hip_device.download(found), hip_device.download(wanted), rtol=1e-5, atol=1e-4)


def test_nf4_of_a_misaligned_view_is_decoded_first(hip_device: Any) -> None:
    """x off by an element: the weight is decoded first. Its codes off by a byte: an error."""
    weight = hip_device.quantize(hip_device.upload(normal(1, (72, 64))), double=True)
    x = normal(2, (40, 64), F16)
    memory = hip_device.upload(np.concatenate([np.zeros(1, F16), x.ravel()]))
    view = hip_device.view(memory, x.shape, 1)
    found = hip_device.download(hip_device.linear_quantized(view, weight, dtype=F32))
    wanted = hip_device.download(hip_device.linear_quantized(hip_device.upload(x), weight, dtype=F32))
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-5)
    packed = hip_device.view(hip_device.zeros((weight.packed.size + 1,), np.uint8), weight.packed.shape, 1)
    object.__setattr__(weight, "packed", packed)
    with pytest.raises(DeviceError, match="weight.packed.*multiple of 4 bytes.*copy"):
        hip_device.linear_quantized(hip_device.upload(x), weight)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_nothing_is_read_behind_a_k_shorter_than_a_tile(emulator: Any, layout: str, dtype: Any) -> None:
    """Operands end where memory does: what a tile has beyond K is neither there nor NaN."""
    m, n, k = 128, 192, 8
    device = emulator.new("gfx1100")
    a, b = normal(1, (k, m) if layout[0] == "t" else (m, k)), normal(2, (n, k) if layout[1] == "t" else (k, n), dtype)
    x, y = device.upload(a), device.upload(b)
    assert not x.nbytes % 256 and not y.nbytes % 256
    product = device.gemm(x, y, trans_a=layout[0] == "t", trans_b=layout[1] == "t", dtype=F32)
    wide = [v.astype(np.float64) for v in (a, b)]
    wanted = (wide[0].T if layout[0] == "t" else wide[0]) @ (wide[1].T if layout[1] == "t" else wide[1])
    np.testing.assert_allclose(device.download(product), wanted, rtol=1e-5, atol=1e-5)


def test_arrays_of_another_device_launch_nothing(emulator: Any) -> None:
    device, other = emulator.new("gfx942"), emulator.new("gfx942")
    weight = device.quantize(device.upload(normal(1, (72, 64))))
    x, w = device.zeros((40, 64)), device.zeros((72, 64))
    foreign, foreign_bias = other.zeros((40, 64)), other.zeros((72,))
    foreign_gradient = other.zeros((40, 72))
    before = emulator.library.emulator_launches()
    with pytest.raises(DeviceError, match="upload it to this device"):
        device.gemm(foreign, w, trans_b=True)
    with pytest.raises(DeviceError, match="upload it to this device"):
        device.linear_quantized(x, weight, bias=foreign_bias)
    with pytest.raises(DeviceError, match="upload it to this device"):
        device.linear_quantized_backward(foreign_gradient, weight)
    assert emulator.library.emulator_launches() == before


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_one_row_of_nf4_is_within_the_limits(hip_device: Any, compare: Any, dtype: Any, nested: bool) -> None:
    weight = ReferenceDevice().quantize(normal(1, (131, 2120)), double=nested)
    inputs = {"x": normal(2, (1, 2120), dtype), "weight": weight, "bias": normal(3, (131,))}
    compare(hip_device, lambda d, x: {"y": d.linear_quantized(x["x"], x["weight"], bias=x["bias"], dtype=F32)}, inputs)
