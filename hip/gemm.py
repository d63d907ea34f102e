"""Matrix products: dense and NF4 weights, forward and backward. gemm_plan.py says which kernel serves which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wgrad.device.errors import DeviceError
from wgrad.device.memory import Array
from wgrad.hip import gemm_plan
from wgrad.hip.elements import type_code
from wgrad.hip.gemm_plan import Card, Plan
from wgrad.hip.quantize import QuantizeOps
from wgrad.hip.runtime.runtime import Long

_HAS_ACCUMULATE, _V_ALONG_RANK, _UNALIGNED, _SWAPPED = 1, 2, 4, 8  # gemm_epilogue.hpp
LowRank = tuple[Array, Array]


@dataclass(frozen=True)
class _Finish:
    """What is added to a product: alpha * product + u op(v) + bias + residual (+ out where accumulated)."""

    alpha: float = 1.0
    bias: Array | None = None
    residual: Array | None = None
    lowrank: LowRank | None = None
    accumulate: bool = False


class GemmOps(QuantizeOps):
    """gemm, linear_nf4, linear_nf4_backward (device/contract.py).

    Raises:
        DeviceError: K differs, a dtype that no kernel reads, an array of another device, NF4 codes that do not start at
            a multiple of 4 bytes, more than 65,535 batches; before anything is launched.
    """

    _gemm_card: Card | None = None

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
        self._check_gemm(a, b, trans_a, trans_b, bias, residual, lowrank, out)
        batch = a.shape[0] if a.ndim == 3 else 1
        m, k = (a.shape[-1], a.shape[-2]) if trans_a else (a.shape[-2], a.shape[-1])
        n = b.shape[-2] if trans_b else b.shape[-1]
        if out is None:
            out = self.empty((batch, m, n) if a.ndim == 3 else (m, n), a.dtype if dtype is None else dtype)
        if not out.size:
            return out
        layout = ("t" if trans_a else "n") + ("t" if trans_b else "n")
        kinds = (type_code(a.dtype), type_code(b.dtype))
        plan = gemm_plan.dense(self._card, kinds, layout, (m, n, k), batch, _multiple(16, a, b), type_code(out.dtype))
        operands: list[Any] = [a, b, *(kinds if plan.kinds else ())]
        if plan.swapped:
            operands = [b, a, *reversed(kinds)]
        strides = [] if plan.source in ("gemv", "gemm_skinny") else [Long(m * k), Long(k * n)]
        finish = _Finish(alpha, bias, residual, lowrank, accumulate)
        self._product(plan, operands, strides, out, (m, n, k), batch, trans_b, finish)
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
        self._check_nf4("linear_nf4", "x", x, weight, weight.shape[1], bias, residual, *(lowrank or ()))
        (m, k), n = x.shape, weight.shape[0]
        finish = _Finish(1.0, bias, residual, lowrank)
        return self._nf4_product(x, weight, (m, n, k), True, x.dtype if dtype is None else dtype, finish)

    def linear_nf4_backward(
        self, dy: Array, weight: Any, *, lowrank: LowRank | None = None, dtype: Any = None
    ) -> Array:
        """[M, N] dy x dequant([N, K]) + u v -> dx [M, K]."""
        self._check_nf4("linear_nf4_backward", "dy", dy, weight, weight.shape[0], *(lowrank or ()))
        (m, n), k = dy.shape, weight.shape[1]
        finish = _Finish(1.0, lowrank=lowrank)
        return self._nf4_product(dy, weight, (m, k, n), False, dy.dtype if dtype is None else dtype, finish)

    def _nf4_product(
        self, x: Array, w: Any, mnk: tuple[int, int, int], trans_b: bool, dtype: Any, finish: _Finish
    ) -> Array:
        m, n, k = mnk
        if not m * n:
            return self.empty((m, n), dtype)
        kind, nested = type_code(x.dtype), w.nested_absmax is not None
        plan = gemm_plan.nf4(self._card, kind, type_code(dtype), nested, "nt" if trans_b else "nn", mnk)
        # linear.hip rounds decoded values to x's type; the others would use them as they are.
        rounds = w.value_dtype != "float32" and (plan.source != "linear" or w.value_dtype != x.dtype.name)
        if w.shape[1] % 8 or k % 8 or not _multiple(16, x) or n * k >= 1 << 32 or rounds:
            # A row would start inside of a group of codes, or one of x inside of a vector.
            decoded = self.nf4_dequantize(w)
            return self.gemm(
                x,
                decoded,
                trans_b=trans_b,
                bias=finish.bias,
                residual=finish.residual,
                lowrank=finish.lowrank,
                dtype=dtype,
            )
        out = self.empty((m, n), dtype)
        operands = [x, w.packed, w.absmax, w.nested_absmax, w.nested_code, w.nested_offset]
        operands += [w.block_size.bit_length() - 1, w.nested_block_size.bit_length() - 1]
        operands += [kind] if plan.kinds else []
        self._product(plan, operands, [], out, mnk, 1, trans_b, finish)
        return out

    # ---- checks --------------------------------------------------------------------------
    @property
    def _card(self) -> Card:
        if self._gemm_card is None:
            has, flushes = self.modules.has, self.architecture == "gfx90a"
            self._gemm_card = Card(
                self.wave, self.compute_units, has("gemm"), has("gemm_split"), flushes_denormals=flushes
            )
        return self._gemm_card

    def _check_gemm(
        self,
        a: Array,
        b: Array,
        trans_a: bool,
        trans_b: bool,
        bias: Array | None,
        residual: Array | None,
        lowrank: LowRank | None,
        out: Array | None,
    ) -> None:
        self._check_arrays(a, b, bias, residual, *(lowrank or ()), out)
        left, right = a.shape[-2 if trans_a else -1], b.shape[-1 if trans_b else -2]
        if left != right or a.ndim != b.ndim or (a.ndim == 3 and a.shape[0] != b.shape[0]):
            raise DeviceError(
                f"gemm: a {list(a.shape)} and b {list(b.shape)} (trans_a={trans_a}, trans_b={trans_b}) must agree in K"
                f" and in their batches, got K = {left} and {right}; check trans_a and trans_b"
            )
        if a.ndim == 3 and a.shape[0] > 65535:
            raise DeviceError(f"gemm: a batch holds at most 65,535 products, got {a.shape[0]:,}; split it")

    def _check_nf4(self, op: str, name: str, x: Array, w: Any, k: int, *others: Array | None) -> None:
        self._check_arrays(x, *others)
        for part in (w.packed, w.absmax, w.nested_absmax, w.nested_code, w.nested_offset):
            if part is not None:
                self.check_owner(part)
        if x.ndim != 2 or x.shape[1] != k:
            raise DeviceError(
                f"{op}: {name} must be [M, {k}] for a weight of {list(w.shape)}, got {list(x.shape)}; pass this layer's"
                " weight"
            )
        if w.packed.address % 4 or (w.nested_absmax is None and w.absmax.address % 4):
            raise DeviceError(
                f"{op}: weight.packed and weight.absmax must start at multiples of 4 bytes, got addresses"
                f" {w.packed.address:#x} and {w.absmax.address:#x}; copy the views into arrays of their own"
            )

    def _check_arrays(self, *arrays: Array | None) -> None:
        for array in arrays:
            if array is not None:
                self.check_owner(array)
                type_code(array.dtype)

    # ---- launch --------------------------------------------------------------------------
    def _product(
        self,
        plan: Plan,
        operands: list[Any],
        strides: list[Any],
        out: Array,
        mnk: tuple[int, int, int],
        batch: int,
        trans_b: bool,
        finish: _Finish,
    ) -> None:
        m, n, k = mnk
        u, v = finish.lowrank or (None, None)
        kinds = [0 if x is None else type_code(x.dtype) for x in (out, finish.residual, u, v)]
        unaligned = not _multiple(16, out, finish.bias, finish.residual)
        flags = _HAS_ACCUMULATE * finish.accumulate | _UNALIGNED * unaligned
        target, bias, residual, now, kind = out, finish.bias, finish.residual, flags, kinds[0]
        if plan.splits > 1:
            target, bias, residual, now, kind = self.empty((plan.splits, m, n)), None, None, 0, 0
        now |= _V_ALONG_RANK * trans_b | _SWAPPED * plan.swapped
        arguments = [*operands, target, bias, residual, u, v, m, n, k, plan.per_split, 0 if u is None else u.shape[1]]
        arguments += [kind, *kinds[1:], now, float(finish.alpha), *strides]
        grid = (-(-n // plan.tile.n), -(-m // plan.tile.m), batch * plan.splits)
        work = 2.0 * batch * m * n * k
        self.launch(plan.source, plan.name, arguments, grid, threads=plan.tile.threads, work=work)
        if plan.splits > 1:
            groups = self.groups(m * -(-n // 4), 256)
            reduce = [target, out, finish.bias, finish.residual, m, n, plan.splits, kinds[0], kinds[1], flags]
            self.launch("gemm_f32", "gemm_reduce", reduce, groups, work=4.0 * m * n * (plan.splits + 1))


def _multiple(nbytes: int, *arrays: Array | None) -> bool:
    """Do all of them start at a multiple of this many bytes?"""
    return all(a is None or a.address % nbytes == 0 for a in arrays)
