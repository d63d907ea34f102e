"""Rows of a table, and their gradient (deterministic). Kernel: embedding.hip."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.device.memory import Array
from wgrad.hip.elements import Elements, type_codes

_NONE = 0xFFFFFFFF  # the end of a chain of places with the same id


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
        dtable, tokens = self.zeros((vocab_size, dy.shape[1])), ids.size
        if dy.size:
            heads, links = self.empty((vocab_size,), np.uint32), self.empty((tokens,), np.uint32)
            self._fill_words(heads, _NONE)
            self.launch("embedding", "embedding_chains", [ids, heads, links, tokens], (1, 1, 1), work=ids.nbytes)
            arguments = [dy, ids, heads, links, dtable, dy.shape[1], type_codes(dy)]
            self.launch("embedding", "embedding_backward", arguments, (tokens, 1, 1), work=2 * dy.nbytes)
        return dtable
