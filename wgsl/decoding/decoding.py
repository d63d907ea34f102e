"""Decoding: append to the KV cache, and sample the next token. Shaders: decoding_*.wgsl."""

from __future__ import annotations

import numpy as np

from wgrad.device.contract import PAGE
from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP, element_types, vector_width, wgsl_type
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime

_READS_AHEAD = 8  # logits that an invocation loads at once


@implements("kv_append")
def kv_append(device: Runtime, cache: Array, new: Array, cache_len: Array) -> None:
    _, keys, groups, width = cache.shape
    tokens, row = new.shape[1], groups * width
    vec = vector_width(row)
    constants: dict[str, Constant] = {"CACHE_T": wgsl_type(cache.dtype, vec), "NEW_T": wgsl_type(new.dtype, vec)}
    n = new.size // vec
    params = [n, row // vec, keys, tokens]
    work = 2.0 * new.nbytes
    device.launch("decoding_kv_append", [cache, new, cache_len], params, device.groups(n, GROUP), constants, work=work)


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
    params: list[int | float] = [n // pages.shape[0], pages.shape[1]]
    if cos is None:
        vec = vector_width(width)
        items, params = n * groups * width // vec, [groups, width // vec, *params, 0]
    else:
        vec = 1 if interleaved else vector_width(width // 2, cos.shape[1])
        items, params = n * groups * width // 2 // vec, [groups, width // 2 // vec, *params, cos.shape[1] // vec]
    constants: dict[str, Constant] = {"ROTATED": cos is not None, "PAGE": PAGE, "INTERLEAVED": interleaved}
    constants |= element_types(vec, X_T=k)
    arrays = [k, v, pages, places, keys, values, *(() if cos is None else (cos, sin))]
    groups_of = device.groups(2 * items, GROUP)
    device.launch("decoding_paged_append", arrays, [items, *params], groups_of, constants, work=4.0 * k.nbytes)


@implements("sample")
def sample(device: Runtime, logits: Array, uniform: Array, settings: Array) -> Array:
    out = device.empty(uniform.shape, np.int32)
    groups, constants = (uniform.size, 1, 1), {"AHEAD": _READS_AHEAD}
    device.launch("decoding_sample", [logits, uniform, settings, out], [logits.shape[-1]], groups, constants)
    return out


@implements("advance")
def advance(
    device: Runtime,
    drawn: Array,
    uniforms: Array,
    tokens: Array,
    step: Array,
    ids: Array,
    positions: Array,
    cache_len: Array,
    uniform: Array,
) -> None:
    arrays = [drawn, uniforms, tokens, step, ids, positions, cache_len, uniform]
    device.launch("decoding_advance", arrays, list(tokens.shape), (1, 1, 1))
