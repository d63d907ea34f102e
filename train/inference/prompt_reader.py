"""Reading tokens of several sequences into their pages, recorded once per shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.replay import Recorded
from wgrad.autograd.tensor import no_grad
from wgrad.device.contract import PAGE, Array
from wgrad.train.inference.row_cache import RowCache, page_table
from wgrad.train.model.kv_cache import Rows
from wgrad.train.model.model import Model
from wgrad.train.model.model_inputs import Inputs
from wgrad.train.model.token_tables import TokenTables

_VIEW = 64  # elements: where a view may begin


class Reading(NamedTuple):
    """The tokens first:last of a sequence whose earlier ones are in its pages, for the row `row` of a cache."""

    tokens: Sequence[int]
    first: int
    last: int
    row: int
    pages: Sequence[int]


class PromptReader:
    """Reader of up to `count` sequences of up to `width` new tokens and `keys` in all, padded on the left.

    once: do not record.
    """

    def __init__(self, model: Model, cache: RowCache, count: int, width: int, keys: int, once: bool = False) -> None:
        device = model.device
        self.model, self.device, self.cache, self.count, self.width, self.keys = (
            model,
            device,
            cache,
            count,
            width,
            keys,
        )
        tokens, self._pages = count * width, -(-keys // PAGE)
        parts = {"ids": (tokens,), "positions": (tokens,), "places": (tokens,), "doc_start": (count, width)}
        parts |= {"pages": (count, self._pages), "sources": (count * keys,), "rows": (count, _VIEW)}
        self._shapes = parts
        self._numbers = device.zeros((sum(map(_room, parts.values())),), np.int32)  # fewer arrays need fewer writes
        views, at = dict[str, Array](), 0
        for name, shape in parts.items():
            views[name] = device.view(self._numbers, shape, at)
            if name == "rows":
                self._rows = [device.view(self._numbers, (1,), at + number * _VIEW) for number in range(count)]
            at += _room(shape)
        cache_len = device.upload(np.array([keys - width], np.int32))
        self._inputs = Inputs(views["ids"], views["positions"], views["doc_start"], cache_len)
        self._last = device.upload(np.arange(1, count + 1, dtype=np.int32) * width - 1)
        self._each = [device.upload(np.array([number], np.int32)) for number in range(count)]
        self._states = cache.states(count) if count > 1 else None
        rows = Rows(self._rows[0], self._rows[0]) if count == 1 and cache.has_states else None
        of_batch = {name: views[name] for name in ("pages", "places", "sources")}
        self._cache = cache.paged(rows, self._states, **of_batch)
        self._recorded = None if once else Recorded(device)

    def run(self, reads: Sequence[Reading]) -> None:
        """Read the tokens, and compute the logits of the next ones."""
        made = {name: np.zeros(shape, np.int32) for name, shape in self._shapes.items()}
        ids, positions, places = (made[name].reshape(self.count, -1) for name in ("ids", "positions", "places"))
        places[:], sources = -1, made["sources"].reshape(self.count, -1)
        made["rows"][:] = self.cache.rows  # unused rows lie past the end, where writes are dropped
        made["pages"] = page_table([read.pages for read in reads], self.count, self._pages)
        for number, read in enumerate(reads):
            pad, places_of_new = self.width - (read.last - read.first), np.arange(read.first, read.last)
            ids[number, pad:] = read.tokens[read.first : read.last]
            positions[number, pad:] = places[number, pad:] = places_of_new
            made["doc_start"][number, pad:] = self.keys - read.last
            made["doc_start"][number, :pad] = self.keys - max(self.width, read.last)  # must be ascending
            seen = np.arange(read.last)
            sources[number, self.keys - read.last :] = np.asarray(read.pages)[seen // PAGE] * PAGE + seen % PAGE
            made["rows"][number, 0] = read.row
        whole = np.zeros(self._numbers.shape, np.int32)
        at = 0
        for array in made.values():
            whole[at : at + array.size] = array.reshape(-1)
            at += _room(array.shape)
        self.device.write(self._numbers, whole)
        if self._recorded is not None:
            self._recorded(self._work)
            return
        self._inputs.tables = self._tables(positions, made["doc_start"] - (self.keys - self.width))
        self._work()

    def _tables(self, positions: np.ndarray, doc_start: np.ndarray) -> TokenTables | None:
        """Return rotary tables for whole sequences whose angles depend on their lengths; None if they do not."""
        tables = TokenTables.empty(self.model.config, positions.size, int(positions.max()) + 1, self.device)
        if tables is not None:
            tables.write(self.device, positions, doc_start)
        return tables

    def _work(self) -> None:
        device = self.device
        with no_grad():
            hidden = self.model.hidden(self._inputs, self._cache)
            # Embedding picks any rows; a view would have to start at a multiple of 64 elements.
            last = F.embedding(hidden, self._last, dtype=hidden.dtype)
        logits = self.model.logits(last.data)
        if self._states is None:
            self.cache.put_logits(logits, self._rows[0])
            return
        for number, row in zip(self._each, self._rows):
            self.cache.put_states(self._states, number, row)
            self.cache.put_logits(device.embedding(logits, number, dtype=np.float32), row)


def _room(shape: Sequence[int]) -> int:
    size = int(np.prod(shape))
    return -(-size // _VIEW) * _VIEW
