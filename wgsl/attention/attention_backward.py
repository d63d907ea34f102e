"""Backward of attention on wgpu.

Dao, FlashAttention-2 (arXiv:2307.08691). It has two kernels, one whose workgroups own queries (dq) and one whose
workgroups own keys (dk, dv). So it needs no atomics, and the same inputs give the same bits. On tensor cores the
gradient of the scores (ds) of some heads at a time is stored, so that dq is one matmul more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wgrad.device.memory import Array
from wgrad.wgsl.attention import attention_matrix
from wgrad.wgsl.attention.attention import HEAVIEST, batches_of, on_units, plan_of, types_of
from wgrad.wgsl.attention.attention_matrix import MatrixRows
from wgrad.wgsl.attention.attention_matrix_keys import MatrixKeys, MatrixStored
from wgrad.wgsl.attention.attention_plan import ceil_div
from wgrad.wgsl.elements import wgsl_element
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.dispatch_parts import launch_range, ranges
from wgrad.wgsl.runtime.runtime import Runtime

# The most FLOP of one workgroup of attention_backward_dkv.wgsl, 200 ms on one of the eight compute units of a GPU of
# 0.5 TFLOP/s. With tensor cores, a compute unit does several times as much.
MOST_OF_A_WORKGROUP, MOST_ON_UNITS = 1.25e10, 5e10
LEAST_STORED = 1 << 28  # scores of a launch that stores ds of a part of the heads: with fewer it is too short


@implements("attention_backward")
def attention_backward(
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
    dq, dk, dv = (device.empty(a.shape, a.dtype) for a in (q, k, v))
    for _, views in batches_of(device, [do, q, k, v, o, lse, doc_start, dq, dk, dv]):
        _attention_backward(device, views, float(scale), window, float(softcap))
    return dq, dk, dv


def _attention_backward(device: Runtime, views: list[Array], scale: float, window: int, softcap: float) -> None:
    do, q, k, v, o, lse, doc_start, dq, dk, dv = views
    reads = [do, q, k, v, _delta(device, do, o, lse), doc_start]
    stored = _stored(device, softcap, *reads[:4])
    if stored is None:
        _backward_dq(device, reads, dq, scale, window, softcap)
    _backward_dkv(device, reads, dk, dv, scale, window, softcap, stored, dq)


def _delta(device: Runtime, do: Array, o: Array, lse: Array) -> Array:
    """[B, H, T, 2] float32: lse log2(e), sum(do * o)."""
    batch, queries, heads, width = do.shape
    stats = device.empty((batch, heads, queries, 2))
    vec, lanes = width % 4 == 0, 8
    steps = ceil_div(width, 4 * lanes)
    constants: dict[str, Constant] = {"LANES": lanes, "STEPS": steps, "VEC": vec, "W4": width // 4, "WIDTH": width}
    device.launch(
        "attention_delta",
        [do, o, lse, stats],
        [batch, queries, heads],
        device.groups(batch * queries * heads, 256 // lanes),
        {**constants, "DO_T": wgsl_element(do, vec), "O_T": wgsl_element(o, vec)},
        work=float(do.nbytes + o.nbytes),
    )
    return stats


def _read_types(units: MatrixRows | MatrixKeys | None, reads: list[Array]) -> dict[str, Constant]:
    do, q, k, v = reads[:4]
    return types_of(q.shape[3] % 4 == 0, units is not None, DO_T=do, Q_T=q, K_T=k, V_T=v)


def _backward_dq(device: Runtime, reads: list[Array], dq: Array, scale: float, window: int, softcap: float) -> None:
    batch, queries, heads, width = dq.shape
    chosen = plan_of(device, width)
    units = on_units("dq", device, chosen, softcap, *reads[:4])
    tile = units or chosen.dq
    tiles = ceil_div(queries, tile.rows)
    groups = tiles * batch * heads
    splits = min(ceil_div(chosen.wanted_groups, groups), ceil_div(queries, 4 * tile.columns))
    part = dq if splits == 1 else device.empty((splits, *dq.shape))
    vec = width % 4 == 0
    launch_range(
        device,
        "attention_matrix_dq" if units else "attention_backward_dq",
        [*reads, part],
        [batch, queries, heads, reads[2].shape[2], tiles, splits, int(window), scale],
        splits * groups,
        {**tile.constants(width), **_read_types(units, reads), "DQ_T": wgsl_element(part, vec), "SOFTCAP": softcap},
        work=3.0 * dq.size * queries,
        heaviest=HEAVIEST,
    )
    _reduce_parts(device, [part], [dq])


@dataclass(frozen=True)
class _Part:
    """Batch elements and key/value heads of one launch."""

    batch_first: int
    batch: int
    kv_first: int
    kv_heads: int

    @property
    def params(self) -> list[int]:
        return [self.batch_first, self.batch, self.kv_first, self.kv_heads]


@dataclass(frozen=True)
class _Stored:
    """How dq is computed from stored ds.

    tile: of the kernel.
    rows: of 16 elements, of one head's ds.
    most: key/value heads whose ds is in memory at a time.
    """

    tile: MatrixStored
    rows: int
    most: int

    def parts(self, batch: int, kv_heads: int) -> Iterator[_Part]:
        """Yield batch elements and key/value heads, as many at a time as `most` allows, in equal parts."""
        for b, b_end in ranges(batch, self.most // kv_heads):
            for head, head_end in ranges(kv_heads, self.most):
                yield _Part(b, b_end - b, head, head_end - head)


def _stored(device: Runtime, softcap: float, do: Array, q: Array, k: Array, v: Array) -> _Stored | None:
    """How dq is computed from ds, or None where ds is not stored: without tensor cores, for few queries, or where that
    of one key/value head takes too much memory."""
    batch, queries, heads, width = q.shape
    chosen = plan_of(device, width)
    keys = on_units("dkv", device, chosen, softcap, do, q, k, v)
    if keys is None:
        return None
    tile = replace(attention_matrix.stored_tile(width), lanes=keys.lanes, shape=keys.shape)
    group, of_all, rows = heads // k.shape[2], batch * k.shape[2], keys.stored_rows(queries)
    most = min(min(device.scratch_bytes, device.max_binding_bytes) // (32 * group * rows), of_all)
    enough = most == of_all or most * group * queries**2 >= LEAST_STORED
    fits = tile.workgroup_bytes(width) <= device.workgroup_bytes and enough
    fills = ceil_div(queries, tile.rows) * batch * heads >= chosen.wanted_groups
    return _Stored(tile, rows, most) if fits and fills else None


def _backward_dkv(
    device: Runtime,
    reads: list[Array],
    dk: Array,
    dv: Array,
    scale: float,
    window: int,
    softcap: float,
    stored: _Stored | None = None,
    dq: Array | None = None,
) -> None:
    """stored, dq: compute dq as well, from ds."""
    batch, queries, kv_heads, width = dk.shape
    heads = reads[1].shape[2]
    group = heads // kv_heads
    chosen = plan_of(device, width)
    units = on_units("dkv", device, chosen, softcap, *reads[:4])
    tile = units or chosen.dkv
    tiles = ceil_div(queries, tile.rows)
    of_heads = [_Part(0, batch, 0, kv_heads)] if stored is None else list(stored.parts(batch, kv_heads))
    groups = tiles * of_heads[0].batch * of_heads[0].kv_heads
    head_parts, query_parts = (units.parts_of_heads, units.parts_of_queries) if units else (1.0, 1.0)
    filling = chosen.wanted_groups / groups
    dividing = (n for n in range(1, group + 1) if group % n == 0 and n >= filling * head_parts)
    head_splits = min(dividing, default=group)
    seen = min(queries, window + tile.rows) if window else queries
    alone = ceil_div(8 * tile.rows * seen * group * width, int(MOST_ON_UNITS if units else MOST_OF_A_WORKGROUP))
    wanted = max(math.ceil(filling * query_parts), alone)
    query_splits = min(ceil_div(wanted, head_splits), ceil_div(queries, 4 * tile.columns))
    splits = head_splits * query_splits
    sums = [a if splits == 1 else device.empty((splits, *a.shape)) for a in (dk, dv)]
    vec = width % 4 == 0
    for part in of_heads:
        ds = [] if stored is None else [device.empty((part.batch, part.kv_heads * group, stored.rows, 16), np.float16)]
        more: dict[str, Constant] = {"STORED": bool(ds), "KEYS": tile.rows} if units else {}
        launch_range(
            device,
            "attention_matrix_dkv" if units else "attention_backward_dkv",
            [*reads, *sums, *ds],
            [batch, queries, heads, kv_heads, tiles, head_splits, query_splits, int(window), *part.params, scale],
            splits * tiles * part.batch * part.kv_heads,
            {
                **tile.constants(width),
                **_read_types(units, reads),
                "DK_T": wgsl_element(sums[0], vec),
                "DV_T": wgsl_element(sums[1], vec),
                "SOFTCAP": softcap,
                **more,
            },
            work=4.0 * reads[1].size * queries * (part.batch * part.kv_heads) / (batch * kv_heads),
            heaviest=HEAVIEST,
        )
        if stored is not None and dq is not None:
            _dq_of_stored(device, stored.tile, units, part, [*ds, reads[2], reads[5]], dq, scale, window)
        del ds  # before that of the next part is allocated
    _reduce_parts(device, sums, [dk, dv])


def _dq_of_stored(
    device: Runtime,
    tile: MatrixStored,
    keys: MatrixKeys,
    part: _Part,
    reads: list[Array],
    dq: Array,
    scale: float,
    window: int,
) -> None:
    """keys: the tile of the kernel that stored ds. reads: ds, k, doc_start."""
    _, queries, heads, width = dq.shape
    kv_heads = reads[1].shape[2]
    tiles, heads_of_part = ceil_div(queries, tile.rows), part.kv_heads * (heads // kv_heads)
    launch_range(
        device,
        "attention_matrix_dq_stored",
        [*reads, dq],
        [queries, heads, kv_heads, tiles, ceil_div(queries, keys.rows), int(window), *part.params, scale],
        tiles * part.batch * heads_of_part,
        {**tile.constants(width), "KEYS": keys.rows, "COLUMNS": keys.columns, "DQ_T": wgsl_element(dq, True)},
        work=float(part.batch * heads_of_part * queries * queries * width),
        heaviest=HEAVIEST,
    )


def _reduce_parts(device: Runtime, parts: Sequence[Array], outs: Sequence[Array]) -> None:
    """Sum each of `parts` over the first axis into the `outs` of the same place, unless the kernel wrote those itself.

    There are one or two, of one size.
    """
    if parts[0] is outs[0]:
        return
    size, vec = outs[0].size, outs[0].size % 4 == 0
    size = size // 4 if vec else size
    types: dict[str, Any] = {f"OUT_T{i}": wgsl_element(out, vec) for i, out in enumerate(outs)}
    x, y, _ = device.groups(size, 256)
    device.launch(
        "attention_reduce",
        [array for pair in zip(parts, outs) for array in pair],
        [size, parts[0].shape[0]],
        (x, y, len(outs)),
        {"P_T": wgsl_element(parts[0], vec), **types, "ARRAYS": len(outs)},
        work=float(sum(part.nbytes for part in parts)),
    )
