"""Rotary position embedding, also straight into a key/value cache. Kernel: rope.hip."""

from __future__ import annotations

from wgrad.hip.buffers import Array
from wgrad.hip.elements import GROUP, PER, Elements, type_codes
from wgrad.hip.errors import DeviceError

_MOST_ITEMS = 2**32 - GROUP


class RopeOps(Elements):
    def rope(self, x: Array, cos: Array, sin: Array, positions: Array, *, inverse: bool = False) -> Array:
        """x [N, H, D]; cos, sin float32 [P, D/2]; positions int32 [N]. `inverse` rotates back.

        Raises:
            DeviceError: x is too large for the kernel's numbers.
        """
        y = self.empty(x.shape, x.dtype)
        self._rope(x, [cos, sin, positions], None, y, (1, 1), inverse)
        return y

    def rope_append(self, x: Array, cos: Array, sin: Array, positions: Array, cache: Array, q_start: Array) -> None:
        """cache [B, S, G, D] in place: cache[:, q_start[0] : q_start[0] + T] = rope(x), x [B T, G, D]; what `rope` and
        `kv_append` do, in one launch (and one rounding, where their dtypes differ).

        Raises:
            DeviceError: x is too large for the kernel's numbers.
        """
        batch, keys = cache.shape[:2]
        self._rope(x, [cos, sin, positions], q_start, cache, (x.shape[0] // batch, keys), False)

    def _rope(
        self, x: Array, tables: list[Array], q_start: Array | None, y: Array, sizes: tuple[int, int], inverse: bool
    ) -> None:
        """sizes: tokens of a batch row of x, keys of one of the cache."""
        n, heads, width = x.shape
        half = width // 2
        items = n * heads * -(-half // PER)
        if items >= _MOST_ITEMS:
            raise DeviceError(
                f"rope: x {list(x.shape)} needs {items:,} work-items, the kernel counts up to 2^32; split x"
            )
        if x.size:
            numbers = [n * heads, heads, half, int(inverse), *sizes, type_codes(x, y)]
            groups = self.groups(items, GROUP)
            self.launch("rope", "rope", [x, *tables, q_start, y, *numbers], groups, work=2 * x.nbytes)
