"""Norms, activations, rotary embedding and softmax: long rows, short rows, many rows, windows, extreme values."""

from __future__ import annotations

import numpy as np
import pytest

from tests.autograd import norms
from tests.wgsl.conftest import NARROW_BYTES
from wgrad.autograd.reference import ReferenceDevice
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.norm.norm import lanes_of_row

F32, F16 = np.dtype(np.float32), np.dtype(np.float16)
# QK-norm's rows; more rows than the workgroups of a dweight pass take at once; rows that fill registers, longer ones
# (of the forward and the backward; with and without vectors of four).
SHAPES = [(67, 64), (37, 96), (41, 128), (4099, 64), (9, 4096), (5, 8192), (3, 16384), (3, 16388), (3, 1024), (3, 5001)]


def norm_inputs(op: str, rng: np.random.Generator, shape: tuple[int, int], dtype: np.dtype) -> dict[str, np.ndarray]:
    a = {name: rng.standard_normal(shape).astype(dtype) for name in norms.ROWS}
    a["weight"], a["bias"] = (0.2 * rng.standard_normal((2, shape[1])) + [[1], [0]]).astype(np.float32)
    return {**a, **{name: array for name, array in norms.forward(op, ReferenceDevice(), a).items() if name != "y"}}


def norm_forward(op: str):
    return lambda d, a: norms.forward(op, d, a)


def norm_backward(op: str):
    def call(d, a):
        plain, *nothing = norms.backward(op, d, a, alone=True).values()
        assert nothing and all(gradient is None for gradient in nothing)
        return {**norms.backward(op, d, a), "plain": plain}

    return call


def test_norms_are_found() -> None:
    assert "rms_norm" in norms.NORMS


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", norms.NORMS)
def test_norms_are_within_the_limits(op, shape, wgpu_device, compare, rng) -> None:
    inputs = norm_inputs(op, rng, shape, F32)
    compare(wgpu_device, norm_forward(op), inputs)
    # dweight sums as many terms as there are rows, in another order than NumPy.
    compare(wgpu_device, norm_backward(op), inputs, backward=True, ulps=4 + shape[0] ** 0.5)


def test_layer_norm_of_equal_elements(wgpu_device: WgpuDevice) -> None:
    norms.check_layer_norm_of_equal_elements(wgpu_device, 5001)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("shape", [(601, 64), (433, 123), (131, 200)], ids=str)
@pytest.mark.parametrize("op", norms.NORMS)
def test_norms_in_windows_are_within_the_limits(op, shape, dtype, narrow, compare, rng) -> None:
    inputs = norm_inputs(op, rng, shape, dtype)
    compare(narrow, norm_forward(op), inputs)
    compare(narrow, norm_backward(op), inputs, backward=True, ulps=4 + shape[0] ** 0.5)


@pytest.mark.parametrize("op", norms.NORMS)
def test_norm_backward_is_the_same_bits_each_time(op, wgpu_device: WgpuDevice, rng: np.random.Generator) -> None:
    inputs = norm_inputs(op, rng, (1003, 72), F32)
    arrays = {name: wgpu_device.upload(a) for name, a in inputs.items()}
    found = [norm_backward(op)(wgpu_device, arrays) for _ in range(3)]
    for name in found[0]:
        first = wgpu_device.download(found[0][name])
        assert all((wgpu_device.download(other[name]) == first).all() for other in found[1:])


def test_lanes_are_a_power_of_two_of_a_workgroup() -> None:
    for columns in range(1, 5000):
        lanes = lanes_of_row(columns)
        assert lanes & (lanes - 1) == 0 and 8 <= lanes <= 256


@pytest.mark.parametrize("name", ["silu", "gelu", "swiglu", "geglu"])
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_activations_of_extremes_in_windows_are_within_the_limits(name, dtype, narrow, compare, rng) -> None:
    shape = (301, 124)
    x, up, dy = (rng.standard_normal(shape).astype(dtype) for _ in range(3))
    x.reshape(-1)[:12] = [0, -0.0, 1e-4, -1e-4, 20, -20, 89, -89, 1e3, -1e3, 3e4, -3e4]
    inputs = {"x": x, "up": up, "dy": dy}
    gated = name.endswith("glu")

    def forward(d, a):
        return {"y": getattr(d, name)(*((a["x"], a["up"]) if gated else (a["x"],)))}

    def backward(d, a):
        found = getattr(d, name + "_backward")(a["dy"], a["x"], *((a["up"],) if gated else ()))
        return dict(zip(("dx", "dup"), found if gated else (found,)))

    compare(narrow, forward, inputs, ulps=16)
    compare(narrow, backward, inputs, backward=True, ulps=16)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("shape", [(203, 3, 64), (131, 7, 40), (65, 5, 6), (301, 1, 128)], ids=str)
def test_rope_in_windows_is_within_the_limits(shape, dtype, wgpu_device, narrow, compare, rng) -> None:
    angle = rng.uniform(-3, 3, (53, shape[2] // 2))
    inputs = {
        "x": rng.standard_normal(shape).astype(dtype),
        "cos": np.cos(angle).astype(np.float32),
        "sin": np.sin(angle).astype(np.float32),
        "positions": rng.integers(0, 53, shape[0]).astype(np.int32),
    }
    for device in (wgpu_device, narrow):
        for inverse in (False, True):
            compare(
                device,
                lambda d, a, inverse=inverse: {
                    "y": d.rope(a["x"], a["cos"], a["sin"], a["positions"], inverse=inverse)
                },
                inputs,
            )


def test_split_and_joined_rope_in_windows_is_within_the_limits(narrow, compare, rng) -> None:
    tokens, heads, kv_heads, width = 131, 3, 2, 24
    angle = rng.uniform(-3, 3, (53, width // 2))
    sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
    inputs = {name: rng.standard_normal((tokens, count, width)).astype(F32) for name, count in sizes.items()}
    inputs["qkv"] = rng.standard_normal((tokens, sum(sizes.values()) * width)).astype(F32)
    assert inputs["qkv"].nbytes > NARROW_BYTES
    inputs |= {"cos": np.cos(angle).astype(F32), "sin": np.sin(angle).astype(F32)}
    inputs["positions"] = rng.integers(0, 53, tokens).astype(np.int32)

    def both(d, a):
        tables = (a["cos"], a["sin"], a["positions"])
        joined = d.rope_split_backward(a["q"], a["k"], a["v"], *tables, interleaved=False)
        apart = d.rope_split(a["qkv"], *tables, heads=heads, kv_heads=kv_heads, interleaved=False)
        return {"qkv": joined, **dict(zip("qkv", apart))}

    compare(narrow, both, inputs)


@pytest.mark.parametrize("shape", [(301, 64), (130, 123), (5, 5001)], ids=str)
def test_softmax_of_large_numbers_in_windows_is_within_the_limits(shape, wgpu_device, narrow, compare, rng) -> None:
    x = (300 * rng.standard_normal(shape)).astype(np.float32)
    x[0] = -1e30  # a row that is masked everywhere is uniform
    x[1, 1:] = -1e30
    inputs = {"x": x, "y": ReferenceDevice().softmax(x), "dy": rng.standard_normal(shape).astype(np.float32)}
    for device in (wgpu_device, narrow) if 64 * 4 * shape[1] <= narrow.max_binding_bytes else (wgpu_device,):
        # exp of a difference of up to 2000 loses digits of the difference: 2^-24 * 2000, in units of 2^-23.
        compare(device, lambda d, a: {"y": d.softmax(a["x"])}, inputs, ulps=1000)
        compare(device, lambda d, a: {"dx": d.softmax_backward(a["dy"], a["y"])}, inputs, backward=True, ulps=16)
