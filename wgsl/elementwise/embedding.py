"""Embedding: gather of table rows, and its backward. Shaders: embedding.wgsl, embedding_backward.wgsl."""

from __future__ import annotations

import numpy as np

from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP, element_types, vector_width, wgsl_type
from wgrad.wgsl.formats.formats import KINDS
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.dispatch_parts import range_parts
from wgrad.wgsl.runtime.runtime import Runtime


@implements("embedding")
def embedding(device: Runtime, table: Array, ids: Array, dtype: np.dtype) -> Array:
    vocab_size, columns = table.shape
    y = device.empty((ids.size, columns), dtype)
    vec = vector_width(columns)
    constants: dict[str, Constant] = {"VEC4": vec == 4, "KIND": KINDS[table.dtype.name], "Y_T": wgsl_type(y.dtype, vec)}
    n = y.size // vec
    for first, last in device.row_windows(vocab_size, columns * table.dtype.itemsize):
        part = device.view(table, (last - first, columns), first * columns)
        params = [n, columns // vec, first, last]
        work = 2.0 * y.nbytes
        device.launch("embedding", [part, ids, y], params, device.groups(n, 4 * GROUP), constants, work=work)
    return y


@implements("embedding_backward")
def embedding_backward(device: Runtime, dy: Array, ids: Array, vocab_size: int) -> Array:
    columns = dy.shape[-1]
    dtable = device.zeros((vocab_size, columns))
    vec, n = vector_width(columns), ids.size
    constants = element_types(vec, DY_T=dy)
    links = device.empty((n,), np.uint32)
    work, count = 4.0 * n * n, -(-n // GROUP)  # each token is compared with all others
    for first, last in range_parts(count, work, device.dispatch_work):
        params, groups = [n, columns // vec, first * GROUP, 0], device.groups(last - first, 1)
        some = work * (last - first) / count
        device.launch("embedding_backward", [ids, links, dy, None], params, groups, constants, entry="link", work=some)
    for first, last in device.row_windows(vocab_size, columns * 4):
        part = device.view(dtable, (last - first, columns), first * columns)
        params = [n, columns // vec, first, last]
        groups = device.groups(n * columns // vec, GROUP)
        work = 2.0 * dy.nbytes
        device.launch("embedding_backward", [ids, links, dy, part], params, groups, constants, work=work)
    return dtable
