"""Rotary position embedding, half-split or interleaved, also straight into a KV cache. Shaders: rope*.wgsl.

The backward is the inverse rotation.
"""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP, element_types, row_parts, vector_width
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime


@implements("rope")
def rope(
    device: Runtime, x: Array, cos: Array, sin: Array, positions: Array, inverse: bool, interleaved: bool
) -> Array:
    _, heads, width = x.shape
    y = device.empty(x.shape, x.dtype)
    vec = _vector_width(width, cos, interleaved)
    # Heads per invocation: a divisor of the heads, so that no lane is idle.
    per = next((n for n in (4, 3, 2) if heads % n == 0), min(heads, 4))
    constants: dict[str, Constant] = {"HEADS": per, "INVERSE": inverse, "INTERLEAVED": interleaved}
    constants |= element_types(vec, X_T=x)
    half, blocks = width // 2 // vec, -(-heads // per)
    for first, tokens, (part, out) in row_parts(device, [x, y]):
        items = tokens * blocks * half
        params = [items, heads, blocks, half, first, cos.shape[1] // vec]
        groups = device.groups(items, GROUP)
        device.launch("rope", [part, cos, sin, positions, out], params, groups, constants, work=2.0 * part.nbytes)
    return y


@implements("rope_split")
def rope_split(
    device: Runtime, qkv: Array, cos: Array, sin: Array, positions: Array, heads: int, kv_heads: int, interleaved: bool
) -> tuple[Array, Array, Array]:
    tokens, width = qkv.shape[0], qkv.shape[1] // (heads + 2 * kv_heads)
    q = device.empty((tokens, heads, width), qkv.dtype)
    k, v = (device.empty((tokens, kv_heads, width), qkv.dtype) for _ in range(2))
    _split_or_join(device, qkv, (q, k, v), (cos, sin, positions), join=False, interleaved=interleaved)
    return q, k, v


@implements("rope_split_backward")
def rope_split_backward(
    device: Runtime, dq: Array, dk: Array, dv: Array, cos: Array, sin: Array, positions: Array, interleaved: bool
) -> Array:
    tokens, heads, width = dq.shape
    dqkv = device.empty((tokens, (heads + 2 * dk.shape[1]) * width), dq.dtype)
    _split_or_join(device, dqkv, (dq, dk, dv), (cos, sin, positions), join=True, interleaved=interleaved)
    return dqkv


def _split_or_join(
    device: Runtime,
    qkv: Array,
    apart: tuple[Array, Array, Array],
    tables: tuple[Array, Array, Array],
    *,
    join: bool,
    interleaved: bool,
) -> None:
    _, heads, width = apart[0].shape
    kv_heads = apart[1].shape[1]
    columns = tables[0].shape[1]
    vec = _vector_width(width, tables[0], interleaved)
    constants: dict[str, Constant] = {"JOIN": join, "INTERLEAVED": interleaved, **element_types(vec, X_T=qkv)}
    half = width // 2 // vec
    for first, tokens, (whole, *parts) in row_parts(device, [qkv, *apart]):
        items = tokens * (heads + 2 * kv_heads) * half
        groups, work = device.groups(items, GROUP), 2.0 * whole.nbytes
        params = [items, heads, kv_heads, half, first, columns // vec]
        device.launch("rope_split", [whole, *tables, *parts], params, groups, constants, work=work)


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
    vec = _vector_width(width, cos, interleaved)
    half = width // 2 // vec
    items = n * groups * half
    arrays = [k, v, cos, sin, positions, cache_len, keys, values]
    params = [items, groups, half, n // batch, length, cos.shape[1] // vec]
    constants: dict[str, Constant] = {"INTERLEAVED": interleaved, **element_types(vec, X_T=k)}
    device.launch("rope_append", arrays, params, device.groups(2 * items, GROUP), constants, work=4.0 * k.nbytes)


def _vector_width(width: int, cos: Array, interleaved: bool) -> int:
    """Elements per invocation of each half of a head; one where pairs are interleaved."""
    return 1 if interleaved else vector_width(width // 2, cos.shape[1])
