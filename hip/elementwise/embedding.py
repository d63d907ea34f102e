"""Rows of a table, and their gradient (deterministic). Kernel: embedding.hip."""

from __future__ import annotations

import numpy as np

from wgrad.device.memory import Array
from wgrad.hip.elements import implements, type_codes
from wgrad.hip.runtime.runtime import Runtime

_NONE = 0xFFFFFFFF  # the end of a chain of positions with the same id


@implements("embedding")
def embedding(device: Runtime, table: Array, ids: Array, dtype: np.dtype) -> Array:
    columns = table.shape[1]
    y = device.empty((ids.size, columns), dtype)
    arguments = [table, ids, y, columns, type_codes(table, y)]
    device.launch("embedding", "embedding", arguments, (ids.size, 1, 1), work=2 * y.nbytes)
    return y


@implements("embedding_backward")
def embedding_backward(device: Runtime, dy: Array, ids: Array, vocab_size: int) -> Array:
    dtable, tokens = device.zeros((vocab_size, dy.shape[1])), ids.size
    heads, links = device.empty((vocab_size,), np.uint32), device.empty((tokens,), np.uint32)
    device._fill_words(heads, _NONE)
    device.launch("embedding", "embedding_chains", [ids, heads, links, tokens], (1, 1, 1), work=ids.nbytes)
    arguments = [dy, ids, heads, links, dtable, dy.shape[1], type_codes(dy)]
    device.launch("embedding", "embedding_backward", arguments, (tokens, 1, 1), work=2 * dy.nbytes)
    return dtable
