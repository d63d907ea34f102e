"""Rotary position embedding. Kernel: rope.hip."""

from __future__ import annotations

from wgrad.hip.buffers import Array
from wgrad.hip.elements import GROUP, PER, Elements, type_codes
from wgrad.hip.runtime import Long


class RopeOps(Elements):
    def rope(self, x: Array, cos: Array, sin: Array, positions: Array, *, inverse: bool = False) -> Array:
        """x [N, H, D]; cos, sin float32 [P, D/2]; positions int32 [N]. `inverse` rotates back."""
        n, heads, width = x.shape
        y, half = self.empty(x.shape, x.dtype), width // 2
        if x.size:
            arguments = [x, cos, sin, positions, y, Long(n * heads), heads, half, int(inverse), type_codes(x, y)]
            groups = self.groups(n * heads * -(-half // PER), GROUP)
            self.launch("rope", "rope", arguments, groups, work=2 * x.nbytes)
        return y
