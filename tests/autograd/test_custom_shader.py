"""Operators from outside with a shader of their own: validation, proof, gradients, replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import wgrad
from wgrad import Tensor
from wgrad.autograd.custom_shader import ShaderOperator, register_shader, unregister_shader
from wgrad.device.contract import Device
from wgrad.device.errors import WgradError

# y[r] = scale[group[r]] * sum of the squares of row r, a row for each workgroup.
ROWS = """
struct Params { width: u32, rows: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> scale: array<f32>;
@group(0) @binding(3) var<storage, read> kind: array<i32>; // of each row
@group(0) @binding(4) var<storage, read_write> y: array<f32>;
var<workgroup> sums: array<f32, 32>;

@compute @workgroup_size(32)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  var sum = 0.0;
  for (var i = lid; i < p.width; i += 32u) {
    let value = x[wg.x * p.width + i];
    sum += value * value;
  }
  sums[lid] = sum;
  workgroupBarrier();
  if (lid == 0u) {
    var total = 0.0;
    for (var i = 0u; i < 32u; i++) { total += sums[i]; }
    y[wg.x] = total * scale[kind[wg.x]];
  }
}
"""
PLAIN = """
struct Params { n: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
@compute @workgroup_size(8, 4)
fn main(
  @builtin(workgroup_id) wg: vec3<u32>,
  @builtin(num_workgroups) n: vec3<u32>,
  @builtin(local_invocation_index) lid: u32
) {
  let i = (wg.x + wg.y * n.x) * 32u + lid;
  if (i < p.n) { y[i] = x[i] * x[i] * x[i]; }
}
"""


@pytest.fixture
def registered() -> Iterator[Callable[..., ShaderOperator]]:
    names: list[str] = []

    def register(name: str, **given: Any) -> ShaderOperator:
        made = register_shader(name, **given)
        names.append(name)
        return made

    yield register
    for name in names:
        unregister_shader(name)


def rows(registered: Callable[..., ShaderOperator], **change: Any) -> ShaderOperator:
    def backward(dy: Tensor, x: Tensor, scale: Tensor, kind: Tensor) -> tuple[Tensor | None, ...]:
        squares = (x * x).sum(1)
        each = wgrad.stack([(dy * squares * (kind == k)).sum() for k in range(2)])
        return x * 2 * (dy * scale[kind]).unsqueeze(1), each, None

    given: dict[str, Any] = {
        "wgsl": ROWS,
        "reference": lambda x, scale, kind: (x * x).sum(axis=1) * scale[kind],
        "backward": backward,
        "output": lambda x, scale, kind: x[:1],
        "params": lambda x, scale, kind: (x[1], x[0]),
        "workgroups": lambda x, scale, kind: x[:1],
        "example": lambda rng: (rng.normal(size=(5, 41)), rng.normal(size=2), np.array([0, 1, 1, 0, 1], np.int32)),
    }
    return registered("row_squares", **{**given, **change})


def test_a_shader_from_outside_is_proved_and_has_gradients(
    device: Device, registered: Callable[..., ShaderOperator]
) -> None:
    operator = rows(registered)
    assert operator.check(device) < 1e-3
    x = Tensor(device.upload(np.arange(12, dtype=np.float32).reshape(3, 4)), device, requires_grad=True)
    scale = Tensor(device.upload(np.array([2.0, 3.0], np.float32)), device)
    y = operator(x * 1.0, scale, device.upload(np.array([0, 1, 0], np.int32)))
    y.sum().backward()
    np.testing.assert_allclose(y.numpy(), [28, 378, 732], rtol=1e-6)
    assert x.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), 2 * x.numpy() * np.array([[2], [3], [2]]), rtol=1e-6)
    assert operator.parameters == ("x", "scale", "kind")


def test_defaults_cover_every_element_and_a_step_is_replayed(
    device: Device, registered: Callable[..., ShaderOperator]
) -> None:
    cube = registered(
        "cube", wgsl=PLAIN, reference=lambda x: x**3, backward=lambda dy, x: dy * 3 * x * x,
        example=lambda rng: (rng.normal(size=(3, 37)),),
    )  # fmt: skip
    assert cube.check(device) < 1e-3
    step = wgrad.compile(lambda x: cube(x * 2) + 1)
    for start in (0, 5, 9):
        x = Tensor(device.upload(np.arange(start, start + 70, dtype=np.float32)), device)
        np.testing.assert_allclose(step(x).numpy(), (2 * x.numpy()) ** 3 + 1, rtol=1e-5)


def test_the_size_of_the_memory_is_a_bound_too(device: Device, registered: Callable[..., ShaderOperator]) -> None:
    """Behind a larger output it writes what it may; a field of the uniform may be i32."""
    bounded = PLAIN.replace("n: u32 }", "n: i32 }").replace("i < p.n", "i < arrayLength(&y) && p.n > 0")
    cube = registered("cube", wgsl=bounded, reference=lambda x: x**3, example=lambda rng: (rng.normal(size=(3, 37)),))
    assert cube.check(device) == 0.0


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "wgsl": ({"wgsl": ROWS.replace("sum += value * value", "sum += value")}, "its WGSL is off by .* on wgpu"),
    "backward": ({"backward": lambda dy, x, scale, kind: (x * 2, scale * 0, None)}, "its backward differs"),
    "gradients": ({"backward": lambda dy, x, scale, kind: dy}, "backward must return 3 gradients, got 1"),
    "shape": ({"backward": lambda dy, x, scale, kind: (dy, None, None)}, "the gradient of x must have its shape"),
    "entry": ({"wgsl": ROWS.replace("fn main", "fn start")}, "must have one entry point, main"),
    "bindings": ({"wgsl": ROWS.replace("binding(4)", "binding(5)")}, r"and 4 \(output\); got \[0, 1, 2, 3, 5\]"),
    "access": ({"wgsl": ROWS.replace("storage, read_write> y", "storage, read> y")}, "binding 4 must be the output"),
    "input": ({"wgsl": ROWS.replace("storage, read> x", "storage, read_write> x")}, "binding 1 must be an input"),
    "element": ({"wgsl": ROWS.replace("kind: array<i32>", "kind: array<f16>")}, "binding 3 must be a storage array"),
    "uniform": ({"wgsl": ROWS.replace("p: Params", "p: vec2<u32>")}, "binding 0 must be a uniform struct"),
    "params": ({"params": lambda x, scale, kind: (x[1],)}, r"the uniform's fields \(u32, u32\); got u32$"),
    "kind": ({"params": lambda x, scale, kind: (x[1], 1.5)}, "got u32, f32"),
    "negative": ({"params": lambda x, scale, kind: (x[1], -1)}, "got u32, i32"),
    "text": ({"params": lambda x, scale, kind: (x[1], "a")}, "got u32, <U1"),
    "no groups": ({"workgroups": lambda x, scale, kind: (0,)}, r"one to three positive whole numbers, got \[0\]"),
    "no function": ({"example": None}, "register_shader: row_squares: example must be a function, got NoneType"),
    "no text": ({"wgsl": None}, "register_shader: wgsl must be text, got NoneType"),
    "bounds": (
        {"workgroups": lambda x, scale, kind: (x[0] + 2,)},
        "row_squares: it writes element 5 of an output of 5; return early where an invocation is beyond the output",
    ),
    "too large": ({"wgsl": ROWS.replace("size(32)", "size(4096)")}, "not run on wgpu: Error matching shader req"),
    "reference": ({"reference": lambda x, scale, kind: x.nothing}, "the reference fails: "),
    "dtype": ({"reference": lambda x, scale, kind: x.sum(1).astype(np.float16)}, r"return float32 \[5\], got float16"),
    "output": ({"output": lambda x, scale, kind: (x[0], 2)}, r"must return float32 \[5, 2\], got float32 \[5\]"),
    "example": ({"example": lambda rng: (rng.normal(size=3),)}, "example must return 3 arrays, for x, scale, kind"),
    "shapes": ({"example": lambda rng: [rng.normal(size=())] * 3}, "output or params fails for the shapes"),
    "syntax": ({"wgsl": ROWS.replace("var sum = 0.0;", "var sum = ;")}, "row_squares"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_shader_is_found(name: str, wgpu_device: Device, registered: Callable[..., ShaderOperator]) -> None:
    change, message = WRONG[name]
    with pytest.raises((WgradError, wgrad.DeviceError), match=message):
        rows(registered, **change).check(wgpu_device)


def test_wrong_calls_are_refused(device: Device, registered: Callable[..., ShaderOperator]) -> None:
    operator = rows(registered, backward=None)
    x = Tensor(device.zeros((3, 4)), device, requires_grad=True)
    scale, kind = Tensor(device.zeros((2,)), device), device.zeros((3,), np.int32)
    with pytest.raises(WgradError, match="row_squares has no gradient: detach its arguments"):
        operator(x, scale, kind)
    with pytest.raises(WgradError, match="kind must be int32, as its binding; got float32"):
        operator(x.detach(), scale, device.zeros((3,)))
    with pytest.raises(WgradError, match="takes x, scale, kind, got 1 arguments"):
        operator(x)
    with pytest.raises(WgradError, match="an operator is called row_squares already"):
        rows(registered)
    with pytest.raises(WgradError, match="name must be a word"):
        register_shader("a b", wgsl=PLAIN, reference=lambda x: x, example=lambda rng: (rng.normal(size=3),))
    assert operator.check(device) == 0.0
