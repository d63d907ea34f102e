"""The key/value cache and the sampling of a token. Kernel: decoding.hip."""

from __future__ import annotations

import math

import numpy as np

from wgrad.device.memory import Array
from wgrad.hip.elements import GROUP, PER, implements, type_codes
from wgrad.hip.runtime.runtime import Runtime


@implements("kv_append")
def kv_append(device: Runtime, cache: Array, new: Array, cache_len: Array) -> None:
    batch, tokens = new.shape[:2]
    row = math.prod(new.shape[2:])
    grid = (-(-tokens * row // (GROUP * PER)), batch, 1)
    arguments = [cache, new, cache_len, cache.shape[1], tokens, row, type_codes(cache, new)]
    device.launch("decoding", "kv_append", arguments, grid, work=2 * new.nbytes)


@implements("sample")
def sample(device: Runtime, logits: Array, uniform: Array, settings: Array) -> Array:
    out = device.empty(uniform.shape, np.int32)
    arguments = [logits, uniform, settings, out, logits.shape[-1]]
    device.launch("decoding", "sample", arguments, (uniform.size, 1, 1), work=logits.nbytes)
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
    arguments = [drawn, uniforms, tokens, step, ids, positions, cache_len, uniform, *tokens.shape]
    device.launch("decoding", "advance", arguments, (1, 1, 1))
