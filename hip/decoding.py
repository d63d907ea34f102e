"""The key/value cache and the sampling of a token. Kernel: decoding.hip."""

from __future__ import annotations

import math

import numpy as np

from wgrad.device.memory import Array
from wgrad.hip.elements import GROUP, PER, Elements, type_codes


class DecodingOps(Elements):
    def kv_append(self, cache: Array, new: Array, cache_len: Array) -> None:
        """cache [B, S, G, D] in place: cache[:, cache_len[0] : cache_len[0] + T] = new [B, T, G, D]."""
        batch, tokens = new.shape[:2]
        row = math.prod(new.shape[2:])
        if new.size:
            grid = (-(-tokens * row // (GROUP * PER)), batch, 1)
            arguments = [cache, new, cache_len, cache.shape[1], tokens, row, type_codes(cache, new)]
            self.launch("decoding", "kv_append", arguments, grid, work=2 * new.nbytes)

    def sample(self, logits: Array, uniform: Array, *, temperature: float, top_k: int, top_p: float) -> Array:
        """logits float32 [V], uniform float32 [1] in [0, 1) -> id int32 [1]."""
        out = self.empty((1,), np.int32)
        arguments = [logits, uniform, out, logits.size, top_k, float(temperature), float(top_p)]
        self.launch("decoding", "sample", arguments, (1, 1, 1), work=logits.nbytes)
        return out
