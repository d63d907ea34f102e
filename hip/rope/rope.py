"""Rotary position embedding, also directly into a key/value cache. Kernels: rope.hip.

The kernels rotate whole heads. For partial rotation the rest of each head is cut off and put back; interleaved pairs
are first rearranged into halves.
"""

from __future__ import annotations

from wgrad.device.errors import TooLarge
from wgrad.device.memory import Array
from wgrad.hip.decoding.decoding import kv_append
from wgrad.hip.elements import GROUP, PER, implements, type_code, type_codes
from wgrad.hip.runtime.columns import apart, together
from wgrad.hip.runtime.runtime import Runtime

_MOST_ITEMS = 2**32 - GROUP


@implements("rope")
def rope(
    device: Runtime, x: Array, cos: Array, sin: Array, positions: Array, inverse: bool, interleaved: bool
) -> Array:
    n, heads, width = x.shape
    turning = 2 * cos.shape[1]
    if turning < width:
        part, rest = apart(device, device.view(x, (n * heads, width)), (turning, width - turning))
        part = rope(device, device.view(part, (n, heads, turning)), cos, sin, positions, inverse, interleaved)
        return device.view(together(device, [device.view(part, (n * heads, turning)), rest]), x.shape)
    if interleaved:
        halves = rope(device, _halves(device, x), cos, sin, positions, inverse, False)
        return _pairs(device, halves)
    y, items = device.empty(x.shape, x.dtype), _items("rope: x", x)
    arguments = [x, cos, sin, positions, y, n * heads, heads, width // 2, int(inverse), type_codes(x, y)]
    device.launch("rope", "rope", arguments, device.groups(items, GROUP), work=2 * x.nbytes)
    return y


@implements("rope_split")
def rope_split(
    device: Runtime, qkv: Array, cos: Array, sin: Array, positions: Array, heads: int, kv_heads: int, interleaved: bool
) -> tuple[Array, Array, Array]:
    width = qkv.shape[1] // (heads + 2 * kv_heads)
    counts = (heads, kv_heads, kv_heads)
    parts = apart(device, qkv, [count * width for count in counts])
    q, k, v = (device.view(part, (qkv.shape[0], count, width)) for part, count in zip(parts, counts))
    q, k = (rope(device, x, cos, sin, positions, False, interleaved) for x in (q, k))
    return q, k, v


@implements("rope_split_backward")
def rope_split_backward(
    device: Runtime, dq: Array, dk: Array, dv: Array, cos: Array, sin: Array, positions: Array, interleaved: bool
) -> Array:
    back = (*(rope(device, x, cos, sin, positions, True, interleaved) for x in (dq, dk)), dv)
    return together(device, [device.view(x, (x.shape[0], x.shape[1] * x.shape[2])) for x in back])


@implements("rope_append")
def rope_append(
    device: Runtime,
    k: Array,
    v: Array,
    cos: Array,
    sin: Array,
    positions: Array,
    keys: Array,
    values: Array,
    cache_len: Array,
    interleaved: bool,
) -> None:
    n, groups, width = k.shape
    batch, length = keys.shape[:2]
    if 2 * cos.shape[1] < width or interleaved:
        new = (batch, n // batch, groups, width)
        kv_append(device, keys, device.view(rope(device, k, cos, sin, positions, False, interleaved), new), cache_len)
        kv_append(device, values, device.view(v, new), cache_len)
        return
    numbers = [n * groups, groups, width // 2, n // batch, length, type_code(k.dtype)]
    arguments = [k, v, cos, sin, positions, cache_len, keys, values, *numbers]
    grid = (device.groups(_items("rope_append: k", k), GROUP)[0], 2, 1)
    device.launch("rope", "rope_append", arguments, grid, work=4 * k.nbytes)


@implements("paged_append")
def paged_append(
    device: Runtime,
    keys: Array,
    values: Array,
    k: Array,
    v: Array,
    pages: Array,
    places: Array,
    cos: Array | None,
    sin: Array | None,
    interleaved: bool,
) -> None:
    n, groups, width = k.shape
    if cos is not None and sin is not None and (2 * cos.shape[1] < width or interleaved):
        k, cos, sin = rope(device, k, cos, sin, places, False, interleaved), None, None
    numbers = [n * groups, groups, width // 2, n // pages.shape[0], pages.shape[1], int(cos is not None)]
    arguments = [k, v, cos, sin, pages, places, keys, values, *numbers, type_code(k.dtype)]
    grid = (device.groups(_items("paged_append: k", k), GROUP)[0], 2, 1)
    device.launch("rope", "paged_append", arguments, grid, work=4 * k.nbytes)


def _halves(device: Runtime, x: Array) -> Array:
    """Rearrange interleaved pairs [N, H, D / 2, 2] into halves [N, H, 2, D / 2]."""
    n, heads, width = x.shape
    sides = apart(device, device.view(x, (x.size // 2, 2)), (1, 1))
    return device.view(together(device, [device.view(side, (n * heads, width // 2)) for side in sides]), x.shape)


def _pairs(device: Runtime, x: Array) -> Array:
    """The inverse of `_halves`."""
    n, heads, width = x.shape
    sides = apart(device, device.view(x, (n * heads, width)), (width // 2, width // 2))
    return device.view(together(device, [device.view(side, (x.size // 2, 1)) for side in sides]), x.shape)


def _items(name: str, x: Array) -> int:
    """Return the work-items for x [N, H, D], eight pairs each.

    Raises:
        TooLarge: There are more than the kernel can count.
    """
    n, heads, width = x.shape
    items = n * heads * -(-(width // 2) // PER)
    if items >= _MOST_ITEMS:
        raise TooLarge(f"{name} {list(x.shape)} needs {items:,} work-items, the kernel counts up to 2^32; split it")
    return items
