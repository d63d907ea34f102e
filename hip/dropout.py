"""Dropout with counter-based random numbers. Kernel: dropout.hip."""

from __future__ import annotations

import math

from wgrad.device.memory import Array
from wgrad.hip.elements import Elements, type_codes
from wgrad.hip.runtime.runtime import Long


class DropoutOps(Elements):
    def dropout(self, x: Array, p: float, seed: Array, stream: int) -> Array:
        """Keep with probability 1 - p and divide by 1 - p; seed uint32 [2]. Its own backward."""
        y = self.empty(x.shape, x.dtype)
        if x.size:
            threshold = math.floor(p * 2**32)
            arguments = [x, seed, y, Long(x.size), stream, threshold, float(1 - p), type_codes(x, y)]
            self.launch("dropout", "dropout", arguments, self.eights(x.size), work=2 * x.nbytes)
        return y
