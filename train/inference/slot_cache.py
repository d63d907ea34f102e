"""A key/value cache of rows that sequences take and leave, and that grows with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from wgrad.device.contract import Array
from wgrad.train.model.kv_cache import KVCache, Rows, as_table, put_rows
from wgrad.train.model.model import Model

_VIEW = 64  # elements: where a view may begin, so rows have a multiple of as many keys


class Place(NamedTuple):
    """The row that something is in, and how many of its keys are in use."""

    row: int
    keys: int


class SlotCache:
    """Keys and values [R, S, G, D] of each layer, and the logits float32 [R, V] that each row's next token is drawn
    from. All rows that are in use end at the same key."""

    def __init__(self, model: Model, rows: int, keys: int) -> None:
        self.model, self.device = model, model.device
        self.rows, self.keys = rows, keys
        assert keys % _VIEW == 0
        self._cache = KVCache.empty(model.config, rows, keys, model.dtype, model.device)
        self._logits = model.device.zeros((rows, model.config.vocab_size))

    def _views(self, of_keys: Callable[[Array], Array], rows: Rows | None = None) -> KVCache:
        cache = self._cache
        keys, values = ({i: of_keys(array) for i, array in part.items()} for part in (cache.keys, cache.values))
        return KVCache(keys, values, cache.states, cache.histories, rows)

    def part(self, first: int, count: int) -> KVCache:
        """Views of some rows."""

        def some(array: Array) -> Array:
            return self.device.view(array, (count, *array.shape[1:]), first * array.size // self.rows)

        if not (self._cache.states or self._cache.histories):
            return self._views(some)
        numbers = np.arange(first, first + count, dtype=np.int32)
        return self._views(some, Rows(self.device.upload(numbers), self.device.upload(numbers[:1].copy())))

    def logits(self, rows: int) -> Array:
        """A view of the first rows'."""
        return self.device.view(self._logits, (rows, self._logits.shape[1]))

    def as_one_row(self, row: Array | None = None) -> KVCache:
        """Views of all rows, one behind the other, as a single row. row: the number of the one that is meant, where
        something is kept of each row as a whole; int32 [1] of the device."""

        def one_row(array: Array) -> Array:
            rows, keys, heads, width = array.shape
            return self.device.view(array, (1, rows * keys, heads, width))

        return self._views(one_row, None if row is None else Rows(row, row))

    def put_states(self, states: KVCache, number: Array, row: Array) -> None:
        """Copy what another cache keeps of its row `number` as a whole to the row `row`; both int32 [1] of the
        device."""
        for ours, theirs in ((self._cache.states, states.states), (self._cache.histories, states.histories)):
            for layer, array in theirs.items():
                table = as_table(array, self.device)
                put_rows(self.device, ours[layer], self.device.embedding(table, number, dtype=array.dtype), row)

    def logits_of(self, rows: Sequence[int] | np.ndarray) -> Array:
        """Return a copy of those of some rows."""
        return self.device.embedding(self._logits, self.device.upload(np.array(rows, np.int32)), dtype=np.float32)

    def set_logits(self, first: int, logits: Array) -> None:
        """logits float32 [N, V] of the rows from `first` on."""
        self.put_logits(logits, self.device.upload(np.array([first], np.int32)))

    def put_logits(self, logits: Array, first: Array) -> None:
        """`set_logits`, with the first row as an int32 [1] of the device."""
        put_rows(self.device, self._logits, logits, first)

    def _as_table(self, array: Array) -> Array:
        rows, keys, heads, width = array.shape
        return self.device.view(array, (rows * keys, heads * width))

    def rebuild(self, rows: int, keys: int, places: Mapping[int, Place], old_end: int, new_end: int) -> bool:
        """Move rows to other rows, and their keys so that they end at `new_end` instead of `old_end`, into a cache of
        another size where it is one. By way of other arrays: a kernel cannot read and write one buffer.

        places: by the row that it moves to. Returns whether the arrays are other ones.
        """
        same = (rows, keys) == (self.rows, self.keys)
        source, order = np.zeros(rows * keys, np.int32), np.zeros(rows, np.int32)
        for row, (before, count) in places.items():
            first = row * keys + new_end - count
            source[first : first + count] = before * self.keys + old_end + np.arange(-count, 0)
            order[row] = before
        ids = self.device.upload(source)
        for arrays in (self._cache.keys, self._cache.values):
            for layer in arrays:
                heads = arrays[layer].shape[2:]
                self._move(arrays, layer, self._as_table(arrays[layer]), ids, (rows, keys, *heads), same)
        whole_rows = self.device.upload(order)
        for arrays in (self._cache.states, self._cache.histories):
            for layer in arrays:
                table, shape = as_table(arrays[layer], self.device), (rows, *arrays[layer].shape[1:])
                self._move(arrays, layer, table, whole_rows, shape, same)
                del table
        logits = self.logits_of(order)
        if same:
            self.device.copy(logits, self._logits)
        else:
            self._logits = logits
        self.rows, self.keys = rows, keys
        return not same

    def _move(
        self, arrays: dict[int, Array], layer: int, table: Array, ids: Array, shape: tuple[int, ...], same: bool
    ) -> None:
        """The rows `ids` of a layer's array, seen as a table, in its place."""
        moved = self.device.embedding(table, ids, dtype=table.dtype)
        if same:
            self.device.copy(moved, table)
        else:
            arrays[layer] = self.device.view(moved, shape)
