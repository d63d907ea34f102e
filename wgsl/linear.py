"""Products with a frozen weight of blocks, forward and backward."""

from __future__ import annotations

from typing import Any

from wgrad.device.memory import Array
from wgrad.wgsl.gemm import GemmOps, product


class LinearOps(GemmOps):
    """linear_nf4, linear_nf4_backward (device/contract.py)."""

    def linear_nf4(
        self,
        x: Array,
        weight: Any,
        *,
        bias: Array | None = None,
        residual: Array | None = None,
        lowrank: tuple[Array, Array] | None = None,
        dtype: Any = None,
    ) -> Array:
        (m, k), n = x.shape, weight.shape[0]
        out = self.empty((m, n), x.dtype if dtype is None else dtype)
        if k % 8 or self.software:
            # A row would start inside a 32-bit word of codes; or decoding once is cheaper than once a tile.
            w = self.nf4_dequantize(weight)  # type: ignore[attr-defined]
            return self.gemm(x, w, trans_b=True, bias=bias, residual=residual, lowrank=lowrank, out=out)
        product(self, x, weight, out, (m, n, k), trans_b=True, bias=bias, residual=residual, lowrank=lowrank)
        return out

    def linear_nf4_backward(
        self, dy: Array, weight: Any, *, lowrank: tuple[Array, Array] | None = None, dtype: Any = None
    ) -> Array:
        (m, n), k = dy.shape, weight.shape[1]
        out = self.empty((m, k), dy.dtype if dtype is None else dtype)
        if k % 8 or self.software:
            w = self.nf4_dequantize(weight)  # type: ignore[attr-defined]
            return self.gemm(dy, w, lowrank=lowrank, out=out)
        product(self, dy, weight, out, (m, k, n), lowrank=lowrank)
        return out
