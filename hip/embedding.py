"""Rows of a table, and their gradient (deterministic). Kernel: embedding.hip."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.hip.buffers import Array
from wgrad.hip.elements import Elements, type_codes


class EmbeddingOps(Elements):
    def embedding(self, table: Array, ids: Array, *, dtype: Any = np.float32) -> Array:
        """table [V, C], ids int32 [N] -> [N, C]."""
        columns = table.shape[1]
        y = self.empty((ids.size, columns), dtype)
        if y.size:
            arguments = [table, ids, y, columns, type_codes(table, y)]
            self.launch("embedding", "embedding", arguments, (ids.size, 1, 1), work=2 * y.nbytes)
        return y

    def embedding_backward(self, dy: Array, ids: Array, vocab_size: int) -> Array:
        """-> dtable float32 [V, C]."""
        dtable = self.zeros((vocab_size, dy.shape[1]))
        if dy.size:
            arguments = [dy, ids, dtable, ids.size, dy.shape[1], type_codes(dy)]
            self.launch("embedding", "embedding_backward", arguments, (ids.size, 1, 1), work=2 * dy.nbytes)
        return dtable
