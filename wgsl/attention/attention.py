"""Causal attention on wgpu: online softmax, grouped heads, sliding windows, packed documents.

Dao, FlashAttention-2 (arXiv:2307.08691): the T x S scores are never stored. The backward: attention_backward.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from wgrad.device.contract import PAGE
from wgrad.device.errors import DeviceError, TooLarge
from wgrad.device.memory import Array
from wgrad.device.shown import counted
from wgrad.wgsl.attention import attention_matrix
from wgrad.wgsl.attention.attention_plan import Plan, ceil_div, decode_bytes, decode_columns, plan
from wgrad.wgsl.elements import wgsl_element
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.dispatch_parts import launch_range
from wgrad.wgsl.runtime.runtime import Runtime

HEAVIEST = 2.0  # work of the heaviest workgroup over the mean, with a causal mask
DECODE_ROWS = 8  # attention_decode.wgsl takes the queries of a key/value head up to this many


def types_of(vec: bool, words: bool = False, **arrays: Array) -> dict[str, Constant]:
    """Element types of arrays as shaders declare them. words: as 16-byte words."""
    return {name: "vec4<u32>" if words else wgsl_element(array, vec) for name, array in arrays.items()}


def plan_of(device: Runtime, width: int) -> Plan:
    found = device.attention_plan or plan(width, device.workgroup_bytes, device.adapter_type, device.few_registers)
    if found is None:
        raise DeviceError(
            f"attention with heads of {width} elements does not fit the {device.workgroup_bytes:,} bytes of workgroup"
            " memory of this device; heads up to 512 elements need 16,384: use another device"
        )
    return found


def batches_of(device: Runtime, arrays: Sequence[Array]) -> Iterator[tuple[int, list[Array]]]:
    """Cut the arrays (batch first) into windows that fit one binding: batch size, views."""
    batch = arrays[0].shape[0]
    rows = [a.nbytes // batch for a in arrays]
    most = min(device.max_binding_bytes // max(r, 1) for r in rows)
    align = max(256 // math.gcd(r, 256) for r in rows)
    step = batch if most >= batch else most // align * align
    if step == 0:
        raise TooLarge(
            f"attention: {counted(align, 'batch element')} of up to {max(rows):,} bytes do not fit one binding of this"
            f" device ({device.max_binding_bytes:,}); use a smaller --max-length"
        )
    for at in range(0, batch, step):
        n = min(step, batch - at)
        yield n, [device.view(a, (n, *a.shape[1:]), at * (a.size // batch)) for a in arrays]


@implements("attention")
def attention(
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
    batch, queries, heads, _ = q.shape
    o, lse = device.empty(q.shape, q.dtype), device.empty((batch, heads, queries))
    for _, views in batches_of(device, [q, k, v, doc_start, o, lse]):
        _attention(device, views, cache_len, float(scale), window, float(softcap))
    return o, lse


def _attention(
    device: Runtime, views: list[Array], cache_len: Array, scale: float, window: int, softcap: float
) -> None:
    q, k, v, doc_start, o, lse = views
    batch, queries, heads, width = q.shape
    rows = queries * heads // k.shape[2]
    if rows <= DECODE_ROWS and device.attention_plan is None and decode_bytes(rows, width) <= device.workgroup_bytes:
        return _decode(device, views, cache_len, scale, window, softcap)
    chosen = plan_of(device, width)
    units = on_units("forward", device, chosen, softcap, q, k, v)
    tile = units or chosen.forward
    tiles = ceil_div(queries, tile.rows)
    groups = tiles * batch * heads
    splits = min(ceil_div(chosen.wanted_groups, groups), ceil_div(k.shape[1], 4 * tile.columns), 64)
    part, part_lse = _forward_parts(device, splits, o, lse)
    vec = width % 4 == 0
    types = {**types_of(vec, units is not None, Q_T=q, K_T=k, V_T=v), **types_of(vec, O_T=part)}
    launch_range(
        device,
        "attention_matrix" if units else "attention",
        [q, k, v, doc_start, cache_len, part, part_lse],
        [batch, queries, k.shape[1], heads, k.shape[2], tiles, splits, int(window), scale],
        splits * groups,
        {**tile.constants(width), **types, "SOFTCAP": softcap},
        work=2.0 * q.size * k.shape[1],
        heaviest=HEAVIEST,
    )
    _combine(device, part, part_lse, o, lse)


def on_units(kernel: str, device: Runtime, chosen: Plan, softcap: float, *arrays: Array) -> Any:
    """The tile on tensor cores, or None. Those kernels have no soft-cap."""
    wanted = device.matrix_units and not softcap
    if not wanted:
        return None
    limits = kernel, device.workgroup_bytes, chosen.wanted_groups
    many = device.matrix_tile == "large"  # the self-test's switch
    return attention_matrix.served(
        *limits,
        *arrays,
        lanes=device.lanes,
        shape=device.matrix_shape,
        many=many,
        subgroup_barrier=device.subgroup_barrier,
    )


def _decode(device: Runtime, views: list[Array], cache_len: Array, scale: float, window: int, softcap: float) -> None:
    """Attend with few queries: all of a key/value head in one workgroup, its keys split among many workgroups."""
    q, k, v, doc_start, o, lse = views
    keys, kv_heads = k.shape[1:3]
    work = float(k.nbytes + v.nbytes)
    _decode_rows(
        device, [q, k, v, doc_start, cache_len], o, lse, keys, kv_heads, {}, [int(window), scale], softcap, work
    )


@implements("paged_attention")
def paged_attention(
    device: Runtime,
    q: Array,
    keys: Array,
    values: Array,
    pages: Array,
    places: Array,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Array, Array]:
    batch, _, heads, width = q.shape
    o, lse = device.empty(q.shape, q.dtype), device.empty((batch, heads, 1))
    group = heads // keys.shape[2]
    fitting = (n for n in range(2, DECODE_ROWS + 1) if decode_bytes(n, width) <= device.workgroup_bytes)
    rows = max(n for n in (1, *fitting) if group % n == 0)
    constants: dict[str, Constant] = {"PAGED": True, "PARTS": group // rows}
    tokens = pages.shape[1] * PAGE
    work = 2.0 * batch * tokens * keys.shape[2] * keys.shape[3] * keys.dtype.itemsize
    arrays = [q, keys, values, pages, places]
    _decode_rows(device, arrays, o, lse, tokens, heads // rows, constants, [window, float(scale)], float(softcap), work)
    return o, lse


def _decode_rows(
    device: Runtime,
    reads: list[Array],
    o: Array,
    lse: Array,
    keys: int,
    kv_heads: int,
    more: dict[str, Constant],
    mask: list[int | float],
    softcap: float,
    work: float,
) -> None:
    """keys: the most of a sequence. kv_heads: groups of query heads, each in one workgroup. mask: window and scale."""
    q, k, v = reads[:3]
    batch, queries, heads, width = q.shape
    groups = batch * kv_heads
    splits = min(ceil_div(keys, PAGE), max(1, 512 // groups), 32)
    part, part_lse = _forward_parts(device, splits, o, lse)
    vec, width4 = width % 4 == 0, ceil_div(width, 4)
    columns = decode_columns(width)
    constants: dict[str, Constant] = {
        "PAGED": False,
        "ROWS": queries * heads // kv_heads,
        "STEPS": ceil_div(width4, 4),
        "COLUMNS": columns,
        "KEY_STEPS": PAGE * columns // 128,
        "W4_PADDED": ceil_div(width4, 4) * 4,
        "W4": width4,
        "WIDTH": width,
        "VEC": vec,
        **more,
    }
    types = types_of(vec, Q_T=q, K_T=k, V_T=v, O_T=part)
    device.launch(
        "attention_decode",
        [*reads, part, part_lse],
        [batch, queries, keys, heads, kv_heads, 1, splits, *mask],
        device.groups(splits * groups, 1),
        {**constants, **types, "SOFTCAP": softcap},
        work=work,
    )
    seen: dict[str, Constant] = {"SEEN": True, "PAGED": constants["PAGED"]}
    _combine(device, part, part_lse, o, lse, reads[3:], [keys, int(mask[0])], seen)


def _forward_parts(device: Runtime, splits: int, o: Array, lse: Array) -> tuple[Array, Array]:
    """Arrays that a forward kernel writes: the results, or their float32 parts."""
    return (o, lse) if splits == 1 else (device.empty((splits, *o.shape)), device.empty((splits, *lse.shape)))


def _combine(
    device: Runtime,
    part: Array,
    part_lse: Array,
    o: Array,
    lse: Array,
    places: Sequence[Array] = (),
    more: Sequence[int] = (),
    constants: Mapping[str, Constant] = MappingProxyType({"SEEN": False}),
) -> None:
    """Merge the results of parts of the keys, unless the kernel wrote `o` itself.

    places, more, constants: for attention_decode.wgsl, which leaves out parts without a visible key: the sequences'
    places, the number of keys and the window, and how they are read.
    """
    if part is o:
        return
    batch, queries, heads, width = o.shape
    vec = width % 4 == 0
    row = width // 4 if vec else width
    device.launch(
        "attention_combine",
        [part, part_lse, o, lse, *places],
        [batch, queries, heads, part.shape[0], *more],
        device.groups(batch * queries * heads * row, 256),
        {**constants, "ROW": row, "P_T": wgsl_element(part, vec), "O_T": wgsl_element(o, vec)},
        work=float(part.nbytes),
    )
