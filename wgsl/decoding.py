"""Decoding: append to the key/value cache, and pick the next token. Shaders: decoding_*.wgsl."""

from __future__ import annotations

import numpy as np

from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP, Elements, vector_width, wgsl_type
from wgrad.wgsl.runtime.compile import Constant


class DecodingOps(Elements):
    def kv_append(self, cache: Array, new: Array, cache_len: Array) -> None:
        """cache [B, S, G, D] in place: cache[:, cache_len[0] : cache_len[0] + T] = new [B, T, G, D]."""
        _, keys, groups, width = cache.shape
        tokens, row = new.shape[1], groups * width
        vec = vector_width(row)
        constants: dict[str, Constant] = {"CACHE_T": wgsl_type(cache.dtype, vec), "NEW_T": wgsl_type(new.dtype, vec)}
        n = new.size // vec
        params = [n, row // vec, keys, tokens]
        work = 2.0 * new.nbytes
        self.launch("decoding_kv_append", [cache, new, cache_len], params, self.groups(n, GROUP), constants, work=work)

    def sample(self, logits: Array, uniform: Array, *, temperature: float, top_k: int, top_p: float) -> Array:
        """logits float32 [V], uniform float32 [1] in [0, 1) -> id int32 [1]."""
        out = self.empty((1,), np.int32)
        params = [logits.size, int(top_k), float(temperature), float(top_p)]
        self.launch("decoding_sample", [logits, uniform, out], params, (1, 1, 1), {"GREEDY": temperature == 0})
        return out
