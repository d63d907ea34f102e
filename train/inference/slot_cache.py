"""A key/value cache of rows that sequences take and leave, and that grows with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from wgrad.device.contract import Array
from wgrad.train.model.model import KVCache, Model

_VIEW = 64  # elements: where a view may begin, so rows have a multiple of as many keys


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

    def logits_of(self, rows: Sequence[int]) -> Array:
        """Return a copy of those of some rows."""
        return self.device.embedding(self._logits, self.device.upload(np.array(rows, np.int32)), dtype=np.float32)

    def set_logits(self, first: int, logits: Array) -> None:
        """logits float32 [N, V] of the rows from `first` on."""
        self.put_logits(logits, self.device.upload(np.array([first], np.int32)))

    def put_logits(self, logits: Array, first: Array) -> None:
        """`set_logits`, with the first row as an int32 [1] of the device. By the operator that appends to a cache: a
        view could not begin at every row."""
        (rows, vocab), count = self._logits.shape, logits.shape[0]
        table, new = self.device.view(self._logits, (1, rows, 1, vocab)), self.device.view(logits, (1, count, 1, vocab))
        self.device.kv_append(table, new, first)

    def move(self, source: int, target: int) -> None:
        """A row to the place of another, by way of another array: a kernel cannot read and write one buffer."""
        rows = self.device.upload(np.arange(self.keys, dtype=np.int32) + source * self.keys)
        for array, out in zip([*self._cache.keys, *self._cache.values], self._row(target)):
            taken = self.device.embedding(self._as_table(array), rows, dtype=array.dtype)
            self.device.copy(self.device.view(taken, out.shape), out)
        self.set_logits(target, self.logits_of([source]))

    def _as_table(self, array: Array) -> Array:
        rows, keys, heads, width = array.shape
        return self.device.view(array, (rows * keys, heads * width))

    def _row(self, row: int) -> list[Array]:
        found = self.part(row, 1)
        return found.keys + found.values

    def rebuild(self, rows: int, keys: int, ends: Mapping[int, int], old_end: int, new_end: int) -> bool:
        """Move the keys of each row so that they end at `new_end`, into a cache of another size where it is one.

        ends: row -> how many of its keys are in use; they end at `old_end`. Returns whether the arrays are other ones.
        """
        same = (rows, keys) == (self.rows, self.keys)
        source = np.zeros(rows * keys, np.int32)
        for row, count in ends.items():
            first = row * keys + new_end - count
            source[first : first + count] = row * self.keys + old_end + np.arange(-count, 0)
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
        if rows != self.rows:
            before = self._logits
            self._logits = self.device.zeros((rows, before.shape[1]))
            self.set_logits(0, before)
        self.rows, self.keys = rows, keys
        return not same
