"""Memory of a batch on the device: pages of keys and values, and for each row states of linear attention and logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from wgrad.device.contract import PAGE, Array
from wgrad.train.inference.pages import NOWHERE
from wgrad.train.model.chunks import ChunkPages
from wgrad.train.model.kv_cache import KVCache, Rows, as_table, put_rows
from wgrad.train.model.model import Model
from wgrad.train.model.paged_cache import PagedCache


class RowCache:
    """Keys and values of each layer [pages, PAGE, G, D]; for each row the states of linear attention, and the logits
    float32 [rows, V] of its next token."""

    def __init__(self, model: Model, rows: int, pages: int) -> None:
        self.device, self.rows, self.pages = model.device, rows, pages
        self._made = model.config, model.dtype
        self._cache = self._empty(pages, rows)
        self._logits = model.device.zeros((rows, model.config.vocab_size))

    def _empty(self, pages: int, rows: int) -> KVCache:
        config, dtype = self._made
        return KVCache.empty(config, pages, PAGE, dtype, self.device, rows=rows)

    def paged(
        self, rows: Rows | None, states: KVCache | None = None, *, pages: Array | None = None, **of_batch: Array | None
    ) -> PagedCache:
        """Return the cache of a batch. rows: its rows of the states; states: used instead; rest: see PagedCache."""
        own = self._cache if states is None else states
        made: dict[str, Any] = {"pages": pages, **of_batch}
        if self._made[0].chunk and pages is not None:
            count, width = pages.shape
            made["chunks"] = ChunkPages(count, width, self._made[0].chunk, self.device)
        return PagedCache(self._cache.keys, self._cache.values, own.states, own.histories, rows, **made)

    def states(self, rows: int) -> KVCache:
        """Return a cache for the states of `rows` other rows, without keys."""
        return self._empty(1, rows) if self.has_states else KVCache({}, {})

    @property
    def has_states(self) -> bool:
        return bool(self._cache.states or self._cache.histories)

    def first_rows(self, count: int) -> Rows | None:
        numbers = np.arange(count, dtype=np.int32)
        return Rows(self.device.upload(numbers), self.device.upload(numbers[:1].copy())) if self.has_states else None

    def logits(self, rows: int) -> Array:
        """Return a view of the logits of the first rows."""
        return self.device.view(self._logits, (rows, self._logits.shape[1]))

    def put_logits(self, logits: Array, row: Array) -> None:
        """Write logits float32 [1, V] to the row in int32 [1] on the device; a row past the end is dropped."""
        put_rows(self.device, self._logits, logits, row)

    def put_states(self, states: KVCache, number: Array, row: Array) -> None:
        """Copy the states of another cache's row `number` to the row `row`; both int32 [1] on the device."""
        for ours, theirs in ((self._cache.states, states.states), (self._cache.histories, states.histories)):
            for layer, array in theirs.items():
                table = as_table(array, self.device)
                put_rows(self.device, ours[layer], self.device.embedding(table, number, dtype=array.dtype), row)

    # ---- other sizes ---------------------------------------------------------------------------
    def grow(self, pages: int) -> None:
        """Grow to `pages` pages, one layer at a time, so that only one takes its memory twice."""
        for arrays in (self._cache.keys, self._cache.values):
            for layer, old in arrays.items():
                new = self.device.zeros((pages, *old.shape[1:]), old.dtype)
                self.device.copy(old, self.device.view(new, old.shape))
                arrays[layer] = new
        self.pages = pages

    def move(self, rows: int, before: Sequence[int]) -> None:
        """Change the number of rows; row r becomes the old row before[r]."""
        order = np.zeros(rows, np.int32)
        order[: len(before)] = before
        ids, same = self.device.upload(order), rows == self.rows
        for arrays in (self._cache.states, self._cache.histories):
            for layer, array in arrays.items():
                moved = self._moved(as_table(array, self.device), ids, same)
                arrays[layer] = self.device.view(moved, (rows, *array.shape[1:]))
        self._logits = self._moved(self._logits, ids, same)
        self.rows = rows

    def _moved(self, table: Array, ids: Array, same: bool) -> Array:
        """Return the rows `ids` of a table. Uses another array, since a kernel cannot read and write one buffer."""
        moved = self.device.embedding(table, ids, dtype=table.dtype)
        if not same:
            return moved
        self.device.copy(moved, table)
        return table


def page_table(pages: Sequence[Sequence[int]], rows: int, width: int) -> np.ndarray:
    """Return int32 [rows, width]: the first pages of each row, filled up with NOWHERE."""
    table = np.full((rows, width), NOWHERE, np.int32)
    for row, own in enumerate(pages):
        first = own[:width]
        table[row, : len(first)] = first
    return table
