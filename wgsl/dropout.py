"""Dropout with counter-based random numbers (Philox-4x32-10): the same keep bits on every device. Its own backward."""

from __future__ import annotations

import math

from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP, Elements, vector_width, wgsl_type
from wgrad.wgsl.runtime.compile import Constant


class DropoutOps(Elements):
    def dropout(self, x: Array, p: float, seed: Array, stream: int) -> Array:
        """x float32 or float16, seed uint32 [2] on the device; kept elements are divided by 1 - p."""
        y = self.empty(x.shape, x.dtype)
        vec = vector_width(x.size)
        constants: dict[str, Constant] = {"VEC": vec, "X_T": wgsl_type(x.dtype, vec)}
        for first, (part, out) in self.flat_parts([x, y]):
            params = [part.size, first // 4, stream & 0xFFFFFFFF, math.floor(p * 2**32), 1.0 - float(p)]
            groups = self.groups(-(-part.size // 4), GROUP)
            self.launch("dropout", [part, seed, out], params, groups, constants, work=2.0 * part.nbytes)
        return y
