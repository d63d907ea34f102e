"""Softmax over the last axis, forward and backward. Kernel: softmax.hip."""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.hip.elements import Elements, type_codes


class SoftmaxOps(Elements):
    def softmax(self, x: Array) -> Array:
        """Over the last axis of [R, C]."""
        y = self.empty(x.shape, x.dtype)
        if x.size:
            arguments = [x, y, x.shape[-1], type_codes(x, y)]
            self.launch("softmax", "softmax", arguments, (x.shape[0], 1, 1), work=2 * x.nbytes)
        return y

    def softmax_backward(self, dy: Array, y: Array) -> Array:
        """y: what the forward gave. -> dx, in dy's dtype."""
        dx = self.empty(dy.shape, dy.dtype)
        if dy.size:
            arguments = [dy, y, dx, dy.shape[-1], type_codes(dy, y, dx)]
            self.launch("softmax", "softmax_backward", arguments, (dy.shape[0], 1, 1), work=3 * dy.nbytes)
        return dx
