"""The plain products: any types, any sizes, no matrix units. Kernel: gemm_plain.hip.

An NF4 weight is dequantised to float32 first: right, and slow.
"""

from __future__ import annotations

from typing import Any

from wgrad.hip.buffers import Array
from wgrad.hip.elements import type_codes
from wgrad.hip.nf4 import NF4Ops

SIDE = 16
LowRank = tuple[Array, Array]


class PlainGemmOps(NF4Ops):
    def gemm(
        self,
        a: Array,
        b: Array,
        *,
        trans_a: bool = False,
        trans_b: bool = False,
        alpha: float = 1.0,
        bias: Array | None = None,
        residual: Array | None = None,
        lowrank: LowRank | None = None,
        out: Array | None = None,
        accumulate: bool = False,
        dtype: Any = None,
    ) -> Array:
        """out = alpha * op(a) op(b) + u op(v) + bias + residual (+ out when `accumulate`); see the contract."""
        *batch, m, k = a.shape
        m, k = (k, m) if trans_a else (m, k)
        n = b.shape[-2] if trans_b else b.shape[-1]
        if out is None:
            out = self.empty((*batch, m, n), a.dtype if dtype is None else dtype)
        if not out.size:
            return out
        u, v = lowrank or (None, None)
        flags = int(trans_a) | int(trans_b) << 1 | int(accumulate) << 2
        sizes = [m, n, k, 0 if u is None else u.shape[1], flags, type_codes(a, b, residual, out, u, v)]
        grid = (-(-n // SIDE), -(-m // SIDE), batch[0] if batch else 1)
        self.launch(
            "gemm_plain", "gemm_plain", [a, b, bias, residual, u, v, out, *sizes, float(alpha)], grid,
            work=2.0 * out.size * k,
        )  # fmt: skip
        return out

    def linear_nf4(
        self,
        x: Array,
        weight: Any,
        *,
        bias: Array | None = None,
        residual: Array | None = None,
        lowrank: LowRank | None = None,
        dtype: Any = None,
    ) -> Array:
        """[M, K] x dequant([N, K])^T + u v^T + bias + residual -> [M, N]."""
        decoded = self.nf4_dequantize(weight)
        return self.gemm(x, decoded, trans_b=True, bias=bias, residual=residual, lowrank=lowrank, dtype=dtype)

    def linear_nf4_backward(
        self, dy: Array, weight: Any, *, lowrank: LowRank | None = None, dtype: Any = None
    ) -> Array:
        """[M, N] dy x dequant([N, K]) + u v -> dx [M, K]."""
        return self.gemm(dy, self.nf4_dequantize(weight), lowrank=lowrank, dtype=dtype)
