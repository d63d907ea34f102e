"""Softmax over the last axis, forward and backward. Kernel: softmax.hip."""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.hip.elements import implements, type_codes
from wgrad.hip.runtime.runtime import Runtime


@implements("softmax")
def softmax(device: Runtime, x: Array) -> Array:
    y = device.empty(x.shape, x.dtype)
    arguments = [x, y, x.shape[-1], type_codes(x, y)]
    device.launch("softmax", "softmax", arguments, (x.shape[0], 1, 1), work=2 * x.nbytes)
    return y


@implements("softmax_backward")
def softmax_backward(device: Runtime, dy: Array, y: Array) -> Array:
    dx = device.empty(dy.shape, dy.dtype)
    arguments = [dy, y, dx, dy.shape[-1], type_codes(dy, y, dx)]
    device.launch("softmax", "softmax_backward", arguments, (dy.shape[0], 1, 1), work=3 * dy.nbytes)
    return dx
