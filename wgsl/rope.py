"""Rotary position embedding (half-split), whose backward is the inverse rotation, also straight into a key/value cache.
Shaders: rope.wgsl, rope_append.wgsl."""

from __future__ import annotations

from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP, element_types, row_parts, vector_width
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime


@implements("rope")
def rope(device: Runtime, x: Array, cos: Array, sin: Array, positions: Array, inverse: bool) -> Array:
    _, heads, width = x.shape
    y = device.empty(x.shape, x.dtype)
    vec = vector_width(width // 2)
    # Heads that an invocation takes: as many as divide the heads, so that no lane is idle.
    per = next((n for n in (4, 3, 2) if heads % n == 0), min(heads, 4))
    constants: dict[str, Constant] = {"HEADS": per, "INVERSE": inverse, **element_types(vec, X_T=x)}
    half, blocks = width // 2 // vec, -(-heads // per)
    for first, tokens, (part, out) in row_parts(device, [x, y]):
        items = tokens * blocks * half
        params = [items, heads, blocks, half, first]
        groups = device.groups(items, GROUP)
        device.launch("rope", [part, cos, sin, positions, out], params, groups, constants, work=2.0 * part.nbytes)
    return y


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
) -> None:
    n, groups, width = k.shape
    batch, length = keys.shape[:2]
    vec = vector_width(width // 2)
    half = width // 2 // vec
    items = n * groups * half
    arrays = [k, v, cos, sin, positions, cache_len, keys, values]
    params, constants = [items, groups, half, n // batch, length], element_types(vec, X_T=k)
    device.launch("rope_append", arrays, params, device.groups(2 * items, GROUP), constants, work=4.0 * k.nbytes)
