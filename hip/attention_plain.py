"""Plain attention: a work-group a row, no matrix units. Kernel: attention_plain.hip."""

from __future__ import annotations

from wgrad.device.errors import DeviceError
from wgrad.device.memory import Array
from wgrad.hip.elements import Elements, type_codes

WIDEST = 512


class PlainAttentionOps(Elements):
    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        doc_start: Array,
        cache_len: Array,
        *,
        scale: float,
        window: int = 0,
    ) -> tuple[Array, Array]:
        """q [B, T, H, D], k v [B, S, G, D], doc_start int32 [B, T], cache_len int32 [1] -> o (q's shape and dtype), lse
        float32 [B, H, T]. See the contract for the mask."""
        batch, queries, heads, width = q.shape
        _check_width(width)
        o, lse = self.empty(q.shape, q.dtype), self.empty((batch, heads, queries))
        sizes = [queries, k.shape[1], heads, k.shape[2], width, int(window), type_codes(o, None, q, k, v)]
        self.launch(
            "attention_plain", "attention_plain", [q, k, v, doc_start, cache_len, o, lse, *sizes, float(scale)],
            (batch * queries * heads, 1, 1), work=2.0 * q.size * k.shape[1],
        )  # fmt: skip
        return o, lse

    def attention_backward(
        self,
        do: Array,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        lse: Array,
        doc_start: Array,
        *,
        scale: float,
        window: int = 0,
    ) -> tuple[Array, Array, Array]:
        """-> dq, dk, dv (shapes and dtypes of q, k, v). T = S and cache_len = 0. Deterministic."""
        batch, queries, heads, width = q.shape
        _check_width(width)
        kv_heads = k.shape[2]
        dq, dk, dv = (self.empty(a.shape, a.dtype) for a in (q, k, v))
        types = type_codes(o, do, q, k, v, dq, dk, dv)
        delta = self.empty(lse.shape)
        rows = (batch * queries * heads, 1, 1)
        self.launch("attention_plain", "attention_delta", [do, o, delta, queries, heads, width, types], rows)
        inputs = [do, q, k, v, lse, delta, doc_start]
        sizes = [queries, heads, kv_heads, width, int(window), types, float(scale)]
        work = 3.0 * q.size * queries
        self.launch("attention_plain", "attention_plain_dq", [*inputs, dq, *sizes], rows, work=work)
        keys = (batch * queries * kv_heads, 1, 1)
        self.launch("attention_plain", "attention_plain_dkv", [*inputs, dk, dv, *sizes], keys, work=2 * work)
        return dq, dk, dv


def _check_width(width: int) -> None:
    if width > WIDEST:
        raise DeviceError(
            f"attention with heads of {width} elements: the HIP kernels take up to {WIDEST}; use --device wgpu or cpu"
        )
