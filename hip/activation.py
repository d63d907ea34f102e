"""SiLU, GELU (tanh form), SwiGLU and GEGLU, forward and backward. Kernel: activation.hip."""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.hip.elements import Elements, type_codes
from wgrad.hip.runtime.runtime import Long


class ActivationOps(Elements):
    def silu(self, x: Array) -> Array:
        return self._activation(x, None, None, gelu=False)[0]

    def silu_backward(self, dy: Array, x: Array) -> Array:
        return self._activation(x, None, dy, gelu=False)[0]

    def gelu(self, x: Array) -> Array:
        return self._activation(x, None, None, gelu=True)[0]

    def gelu_backward(self, dy: Array, x: Array) -> Array:
        return self._activation(x, None, dy, gelu=True)[0]

    def swiglu(self, gate: Array, up: Array) -> Array:
        return self._activation(gate, up, None, gelu=False)[0]

    def swiglu_backward(self, dy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
        """-> dgate, dup."""
        dgate, dup = self._activation(gate, up, dy, gelu=False)
        assert dup is not None
        return dgate, dup

    def geglu(self, gate: Array, up: Array) -> Array:
        return self._activation(gate, up, None, gelu=True)[0]

    def geglu_backward(self, dy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
        """-> dgate, dup."""
        dgate, dup = self._activation(gate, up, dy, gelu=True)
        assert dup is not None
        return dgate, dup

    def _activation(self, x: Array, up: Array | None, dy: Array | None, *, gelu: bool) -> tuple[Array, Array | None]:
        """y (without dy), or dx and dup: the result has x's dtype, dup has up's."""
        y = self.empty(x.shape, x.dtype)
        dup = self.empty(up.shape, up.dtype) if up is not None and dy is not None else None
        arrays = [x, up, dy, y, dup]
        if x.size:
            work = sum(a.nbytes for a in arrays if a is not None)
            arguments = [*arrays, Long(x.size), int(gelu), type_codes(*arrays)]
            self.launch("activation", "activation", arguments, self.eights(x.size), work=work)
        return y, dup
