"""The cache of a decoder whose keys and values are in pages that sequences share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wgrad.autograd import functional as F
from wgrad.autograd.ops.sinks import attend, with_sinks
from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array
from wgrad.train.model.chunks import ChunkPages, in_chunks
from wgrad.train.model.kv_cache import KVCache, Rope
from wgrad.train.model.model_inputs import Inputs


@dataclass
class PagedCache(KVCache):
    """A cache in pages.

    Attributes:
        keys, values: Of each layer, [M, PAGE, G, D].
        pages: Pages of each row of the batch, int32 [B, W].
        places: Position of each new token in its sequence, int32 [B T]; -1: no token.
        sources: If rows have several new tokens: indices in `keys` of the tokens that a row sees, from the first of its
            sequence to the last new one, which is at the end; int32 [B S]. None: one new token in each row.
        chunks: If some layers attend in chunks, and each row has one new token: the pages of these chunks.
    """

    pages: Array = None
    places: Array = None
    sources: Array | None = None
    chunks: ChunkPages | None = None

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        sinks: Any,
        inputs: Inputs,
        rope: Rope | None,
        chunk: int = 0,
        **options: Any,
    ) -> Tensor:
        device, keys, values = q.device, self.keys[layer], self.values[layer]
        if k is not None and v is not None:
            self._append(layer, k, v, inputs, rope)
        if self.sources is None:
            seen = self.pages, self.places
            seen = self.chunks.of(*seen) if chunk and self.chunks is not None else seen
            o, lse = device.paged_attention(q.data, keys, values, *seen, **options)
            return Tensor(o if sinks is None else with_sinks(o, lse, sinks, device), device)
        shape = (inputs.batch, self.sources.shape[0] // inputs.batch, *keys.shape[2:])
        side_by_side = (self._gathered(Tensor(pool, device)).reshape(*shape) for pool in (keys, values))
        inputs = in_chunks(inputs, chunk, device) if chunk else inputs
        return attend(q, *side_by_side, sinks, inputs.doc_start, inputs.cache_len, **options)

    def _append(self, layer: int, k: Tensor, v: Tensor, inputs: Inputs, rope: Rope | None) -> None:
        if rope is not None and inputs.tables is not None:  # the tables' rows are tokens of the batch, not places
            k, rope = F.rope(k, *rope[:3], interleaved=rope.interleaved), None
        tables, turned = (rope[:2], {"interleaved": rope.interleaved}) if rope is not None else ((), {})
        new = (k.data, v.data, self.pages, self.places)
        k.device.paged_append(self.keys[layer], self.values[layer], *new, *tables, **turned)

    def _gathered(self, pool: Tensor) -> Tensor:
        pages, tokens, heads, width = pool.shape
        return F.embedding(pool.reshape(pages * tokens, heads * width), self.sources, dtype=pool.dtype)
