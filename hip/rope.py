"""Rotary position embedding. Kernel: rope.hip."""

from __future__ import annotations

from wgrad.hip.buffers import Array
from wgrad.hip.elements import GROUP, PER, Elements, type_codes
from wgrad.hip.errors import DeviceError

_MOST_ITEMS = 2**32 - GROUP


class RopeOps(Elements):
    def rope(self, x: Array, cos: Array, sin: Array, positions: Array, *, inverse: bool = False) -> Array:
        """x [N, H, D]; cos, sin float32 [P, D/2]; positions int32 [N]. `inverse` rotates back."""
        n, heads, width = x.shape
        y, half = self.empty(x.shape, x.dtype), width // 2
        items = n * heads * -(-half // PER)
        if items >= _MOST_ITEMS:
            raise DeviceError(
                f"rope: x {list(x.shape)} needs {items:,} work-items, the kernel counts up to 2^32; split x"
            )
        if x.size:
            arguments = [x, cos, sin, positions, y, n * heads, heads, half, int(inverse), type_codes(x, y)]
            self.launch("rope", "rope", arguments, self.groups(items, GROUP), work=2 * x.nbytes)
        return y
