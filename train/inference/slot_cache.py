"""A key/value cache of rows that sequences take and leave, and that grows with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from wgrad.device.contract import Array, Device
from wgrad.train.model.model import Model
from wgrad.train.model.model_inputs import KVCache

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

    @property
    def _all(self) -> tuple[list[Array], list[Array]]:
        return self._cache.keys, self._cache.values

    def part(self, first: int, count: int) -> KVCache:
        """Views of some rows."""
        shape = (count, *self._cache.keys[0].shape[1:])
        offset = first * self.keys * shape[2] * shape[3]
        keys, values = ([self.device.view(array, shape, offset) for array in arrays] for arrays in self._all)
        return KVCache(keys, values)

    def logits(self, rows: int) -> Array:
        """A view of the first rows'."""
        return self.device.view(self._logits, (rows, self._logits.shape[1]))

    def as_one_row(self) -> KVCache:
        """Views of all rows, one behind the other, as a single row."""

        def one_row(array: Array) -> Array:
            rows, keys, heads, width = array.shape
            return self.device.view(array, (1, rows * keys, heads, width))

        return KVCache([one_row(array) for array in self._cache.keys], [one_row(array) for array in self._cache.values])

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
        for arrays in self._all:
            for number, array in enumerate(arrays):
                shape, table = array.shape, self._as_table(array)
                moved = self.device.embedding(table, ids, dtype=array.dtype)
                if same:
                    self.device.copy(moved, table)
                else:
                    arrays[number] = self.device.view(moved, (rows, keys, *shape[2:]))
                del array, table, moved
        logits = self.logits_of(order)
        if same:
            self.device.copy(logits, self._logits)
        else:
            self._logits = logits
        self.rows, self.keys = rows, keys
        return not same


def put_rows(device: Device, table: Array, rows: Array, first: Array) -> None:
    """table [R, V] from row first[0] on = rows [N, V]. By the operator that appends to a cache: a view could not begin
    at every row."""
    (count, width), new = table.shape, rows.shape[0]
    device.kv_append(device.view(table, (1, count, 1, width)), device.view(rows, (1, new, 1, width)), first)
