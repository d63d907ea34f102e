"""Softmax over the last axis, forward and backward. Shader: softmax.wgsl."""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.wgsl.elements import Elements, wgsl_type
from wgrad.wgsl.runtime.compile import Constant


class SoftmaxOps(Elements):
    def softmax(self, x: Array) -> Array:
        """Over the last axis of [R, C]."""
        return self._softmax("main", x, None)

    def softmax_backward(self, dy: Array, y: Array) -> Array:
        """y: what the forward gave. -> dx, in dy's dtype."""
        return self._softmax("backward", dy, y)

    def _softmax(self, entry: str, x: Array, y: Array | None) -> Array:
        out = self.empty(x.shape, x.dtype)
        constants: dict[str, Constant] = {"X_T": wgsl_type(x.dtype), "Y_T": wgsl_type((x if y is None else y).dtype)}
        for _, rows, parts in self.row_parts([x, y, out]):
            params = [rows, x.shape[-1]]
            work = 4.0 * rows * x.shape[-1]
            self.launch("softmax", parts, params, self.groups(rows, 1), constants, entry=entry, work=work)
        return out
