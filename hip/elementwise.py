"""add, mul, scale, bias, mask, cast. Kernel: elementwise.hip."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.device.memory import Array
from wgrad.hip.elements import Elements, type_code
from wgrad.hip.runtime.runtime import Long

_ADD, _MUL, _SCALE, _SCALE_BY, _BIAS, _MASK, _CAST = range(7)


class ElementwiseOps(Elements):
    def add(self, a: Array, b: Array, *, out: Array | None = None) -> Array:
        """a + b, same shape; out may be a or b."""
        return self._elementwise(_ADD, a, b, self.empty(a.shape, a.dtype) if out is None else out)

    def mul(self, a: Array, b: Array) -> Array:
        return self._elementwise(_MUL, a, b, self.empty(a.shape, a.dtype))

    def scale(self, x: Array, alpha: float) -> Array:
        return self._elementwise(_SCALE, x, None, self.empty(x.shape, x.dtype), alpha=alpha)

    def scale_by(self, x: Array, factor: Array) -> Array:
        """x * factor[0], factor float32 [1]."""
        return self._elementwise(_SCALE_BY, x, factor, self.empty(x.shape, x.dtype))

    def bias(self, x: Array, b: Array) -> Array:
        """x [R, C] + b [C]."""
        return self._elementwise(_BIAS, x, b, self.empty(x.shape, x.dtype), columns=b.size)

    def mask(self, x: Array, keep: Array, value: float) -> Array:
        """x where keep (uint32, same shape) is not zero, else value."""
        return self._elementwise(_MASK, x, keep, self.empty(x.shape, x.dtype), alpha=value)

    def cast(self, x: Array, dtype: Any) -> Array:
        return self._elementwise(_CAST, x, None, self.empty(x.shape, dtype))

    def _elementwise(
        self, op: int, a: Array, b: Array | None, y: Array, *, alpha: float = 0.0, columns: int = 1
    ) -> Array:
        second = 0 if b is None or b.dtype == np.uint32 else type_code(b.dtype)
        types = type_code(a.dtype) | second << 4 | type_code(y.dtype) << 8
        if a.size:
            arguments = [a, b, y, Long(a.size), op, types, columns, float(alpha)]
            work = a.nbytes + y.nbytes + (0 if b is None else b.nbytes)
            self.launch("elementwise", "elementwise", arguments, self.eights(a.size), work=work)
        return y
