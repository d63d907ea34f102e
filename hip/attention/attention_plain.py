"""Plain attention: one work-group per row, no tensor cores. Kernel: attention_plain.hip."""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.hip.elements import type_codes
from wgrad.hip.runtime.runtime import Runtime


def plain_attention(
    device: Runtime,
    q: Array,
    k: Array,
    v: Array,
    doc_start: Array,
    cache_len: Array,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Array, Array]:
    batch, queries, heads, width = q.shape
    o, lse = device.empty(q.shape, q.dtype), device.empty((batch, heads, queries))
    sizes = [queries, k.shape[1], heads, k.shape[2], width, window, type_codes(o, None, q, k, v)]
    device.launch(
        "attention_plain", "attention_plain",
        [q, k, v, doc_start, cache_len, o, lse, *sizes, float(scale), float(softcap)],
        (batch * queries * heads, 1, 1), work=2.0 * q.size * k.shape[1],
    )  # fmt: skip
    return o, lse


def plain_attention_backward(
    device: Runtime,
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    doc_start: Array,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Array, Array, Array]:
    batch, queries, heads, width = q.shape
    kv_heads = k.shape[2]
    dq, dk, dv = (device.empty(a.shape, a.dtype) for a in (q, k, v))
    types = type_codes(o, do, q, k, v, dq, dk, dv)
    delta = device.empty(lse.shape)
    rows = (batch * queries * heads, 1, 1)
    device.launch("attention_plain", "attention_delta", [do, o, delta, queries, heads, width, types], rows)
    inputs = [do, q, k, v, lse, delta, doc_start]
    sizes = [queries, heads, kv_heads, width, window, types, float(scale), float(softcap)]
    work = 3.0 * q.size * queries
    device.launch("attention_plain", "attention_plain_dq", [*inputs, dq, *sizes], rows, work=work)
    keys = (batch * queries * kv_heads, 1, 1)
    device.launch("attention_plain", "attention_plain_dkv", [*inputs, dk, dv, *sizes], keys, work=2 * work)
    return dq, dk, dv
