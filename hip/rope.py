"""Rotary position embedding, also straight into a key/value cache. Kernels: rope.hip."""

from __future__ import annotations

from wgrad.device.errors import DeviceError
from wgrad.device.memory import Array
from wgrad.hip.elements import GROUP, PER, Elements, type_code, type_codes

_MOST_ITEMS = 2**32 - GROUP


class RopeOps(Elements):
    def rope(self, x: Array, cos: Array, sin: Array, positions: Array, *, inverse: bool = False) -> Array:
        """x [N, H, D]; cos, sin float32 [P, D/2]; positions int32 [N]. `inverse` rotates back.

        Raises:
            DeviceError: x is too large for the kernel's numbers.
        """
        n, heads, width = x.shape
        y, items = self.empty(x.shape, x.dtype), _items("rope: x", x)
        if items:
            arguments = [x, cos, sin, positions, y, n * heads, heads, width // 2, int(inverse), type_codes(x, y)]
            self.launch("rope", "rope", arguments, self.groups(items, GROUP), work=2 * x.nbytes)
        return y

    def rope_append(
        self, k: Array, v: Array, cos: Array, sin: Array, positions: Array, keys: Array, values: Array, cache_len: Array
    ) -> None:
        """keys, values [B, S, G, D] in place from cache_len[0] on = rope(k), v; k, v [B T, G, D], all of one dtype;
        cos, sin float32 [P, D/2], positions int32 [B T], cache_len int32 [1]. What `rope` and `kv_append` of both do,
        in one launch.

        Raises:
            DeviceError: k is too large for the kernel's numbers.
        """
        n, groups, width = k.shape
        batch, length = keys.shape[:2]
        items = _items("rope_append: k", k)
        if items:
            numbers = [n * groups, groups, width // 2, n // batch, length, type_code(k.dtype)]
            arguments = [k, v, cos, sin, positions, cache_len, keys, values, *numbers]
            grid = (self.groups(items, GROUP)[0], 2, 1)
            self.launch("rope", "rope_append", arguments, grid, work=4 * k.nbytes)


def _items(name: str, x: Array) -> int:
    """Work-items for x [N, H, D], eight pairs each."""
    n, heads, width = x.shape
    items = n * heads * -(-(width // 2) // PER)
    if items >= _MOST_ITEMS:
        raise DeviceError(f"{name} {list(x.shape)} needs {items:,} work-items, the kernel counts up to 2^32; split it")
    return items
