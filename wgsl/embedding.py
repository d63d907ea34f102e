"""Embedding: gather of table rows, and its backward. Shaders: embedding.wgsl, embedding_backward.wgsl."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP, Elements, compute_type, vector_width, wgsl_type
from wgrad.wgsl.formats import KINDS
from wgrad.wgsl.runtime.compile import Constant


class EmbeddingOps(Elements):
    def embedding(self, table: Array, ids: Array, *, dtype: Any = np.float32) -> Array:
        """table [V, C] float32, float16 or bfloat16, ids int32 [N] -> [N, C]. A table larger than a binding is taken in
        windows of rows, each of which fills in its own ids."""
        vocab_size, columns = table.shape
        y = self.empty((ids.size, columns), dtype)
        vec = vector_width(columns)
        constants: dict[str, Constant] = {
            "VEC4": vec == 4,
            "KIND": KINDS[table.dtype.name],
            "Y_T": wgsl_type(y.dtype, vec),
        }
        n = y.size // vec
        if n == 0:
            return y
        for first, last in self.row_windows(vocab_size, columns * table.dtype.itemsize):
            part = self.view(table, (last - first, columns), first * columns)
            params = [n, columns // vec, first, last]
            work = 2.0 * y.nbytes
            self.launch("embedding", [part, ids, y], params, self.groups(n, 4 * GROUP), constants, work=work)
        return y

    def embedding_backward(self, dy: Array, ids: Array, vocab_size: int) -> Array:
        """-> dtable float32 [V, C]. Deterministic."""
        columns = dy.shape[-1]
        dtable = self.zeros((vocab_size, columns))
        if ids.size == 0:
            return dtable
        vec, n = vector_width(columns), ids.size
        constants: dict[str, Constant] = {"C_T": compute_type(vec), "DY_T": wgsl_type(dy.dtype, vec)}
        links = self.empty((n,), np.uint32)
        params = [n, columns // vec, 0, vocab_size]
        groups = self.groups(n, GROUP)
        self.launch("embedding_backward", [ids, links, dy, None], params, groups, constants, entry="link")
        for first, last in self.row_windows(vocab_size, columns * 4):
            part = self.view(dtable, (last - first, columns), first * columns)
            params = [n, columns // vec, first, last]
            groups = self.groups(n * columns // vec, GROUP)
            work = 2.0 * dy.nbytes
            self.launch("embedding_backward", [ids, links, dy, part], params, groups, constants, work=work)
        return dtable
