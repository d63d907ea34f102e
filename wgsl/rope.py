"""Rotary position embedding (half-split); its backward is the inverse rotation. Shader: rope.wgsl."""

from __future__ import annotations

from wgrad.wgsl.buffers import Array
from wgrad.wgsl.compile import Constant
from wgrad.wgsl.elements import GROUP, Elements, compute_type, vector_width, wgsl_type


class RopeOps(Elements):
    def rope(self, x: Array, cos: Array, sin: Array, positions: Array, *, inverse: bool = False) -> Array:
        """x [N, H, D]; cos, sin float32 [P, D/2]; positions int32 [N] -> [N, H, D]."""
        _, heads, width = x.shape
        y = self.empty(x.shape, x.dtype)
        vec = vector_width(width // 2)
        # Heads that an invocation takes: as many as divide the heads, so that no lane is idle.
        per = next((n for n in (4, 3, 2) if heads % n == 0), min(heads, 4))
        constants: dict[str, Constant] = {
            "HEADS": per,
            "INVERSE": inverse,
            "C_T": compute_type(vec),
            "X_T": wgsl_type(x.dtype, vec),
        }
        half, blocks = width // 2 // vec, -(-heads // per)
        for first, tokens, (part, out) in self.row_parts([x, y]):
            items = tokens * blocks * half
            params = [items, heads, blocks, half, first]
            groups = self.groups(items, GROUP)
            self.launch("rope", [part, cos, sin, positions, out], params, groups, constants, work=2.0 * part.nbytes)
        return y
