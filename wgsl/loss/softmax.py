"""Softmax over the last axis, forward and backward. Shader: softmax.wgsl."""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.wgsl.elements import row_parts, wgsl_type
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime


@implements("softmax")
def softmax(device: Runtime, x: Array) -> Array:
    return _softmax(device, "main", x, None)


@implements("softmax_backward")
def softmax_backward(device: Runtime, dy: Array, y: Array) -> Array:
    return _softmax(device, "backward", dy, y)


def _softmax(device: Runtime, entry: str, x: Array, y: Array | None) -> Array:
    out = device.empty(x.shape, x.dtype)
    constants: dict[str, Constant] = {"X_T": wgsl_type(x.dtype), "Y_T": wgsl_type((x if y is None else y).dtype)}
    for _, rows, parts in row_parts(device, [x, y, out]):
        params = [rows, x.shape[-1]]
        work = 4.0 * rows * x.shape[-1]
        device.launch("softmax", parts, params, device.groups(rows, 1), constants, entry=entry, work=work)
    return out
