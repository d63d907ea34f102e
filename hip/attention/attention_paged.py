"""Attention of one query per sequence on a paged cache: the pages are first gathered into contiguous arrays.

The attention kernels are tuned for contiguous keys. Kernel: gather_pages of decoding.hip.
"""

from __future__ import annotations

import math

import numpy as np

from wgrad.device.contract import PAGE
from wgrad.device.memory import Array
from wgrad.hip.attention.attention import AttentionRounding, attention
from wgrad.hip.elements import GROUP, PER, implements, type_code


@implements("paged_attention")
def paged_attention(
    device: AttentionRounding,
    q: Array,
    keys: Array,
    values: Array,
    pages: Array,
    places: Array,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Array, Array]:
    (batch, width), row = pages.shape, math.prod(keys.shape[2:])
    tokens = width * PAGE
    k, v = (device.empty((batch, tokens, *keys.shape[2:]), keys.dtype) for _ in range(2))
    starts, end = device.empty((batch, 1), np.int32), device.empty((1,), np.int32)
    grid = (-(-tokens * -(-row // PER) // GROUP), 2 * batch, 1)
    arguments = [keys, values, pages, places, k, v, starts, end, width, row, type_code(keys.dtype)]
    device.launch("decoding", "gather_pages", arguments, grid, work=4 * k.nbytes)
    return attention(device, q, k, v, starts, end, scale, window, softcap)
