"""Reading prompts, recorded once for each width."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.replay import Recorded
from wgrad.autograd.tensor import no_grad
from wgrad.train.inference.slot_cache import SlotCache
from wgrad.train.model.kv_cache import KVCache
from wgrad.train.model.model import Model
from wgrad.train.model.model_inputs import Inputs

_VIEW = 64  # elements: where a view may begin


class RecordedPrefill:
    """Up to `width` tokens of one sequence, filled up on the left, into any row of a cache: for this work the cache is
    one long row, and where in it a sequence is, is an input."""

    def __init__(self, model: Model, slots: SlotCache, width: int) -> None:
        device = model.device
        self.model, self.device, self.slots, self.width = model, device, slots, width
        self._inputs = Inputs(
            ids=device.zeros((width,), np.int32),
            positions=device.zeros((width,), np.int32),
            doc_start=device.zeros((1, width), np.int32),
            cache_len=device.zeros((1,), np.int32),
        )
        self._row = device.zeros((1,), np.int32)
        self._cache = slots.as_one_row(self._row)
        self._last = device.upload(np.array([width - 1], np.int32))
        self._recorded = Recorded(device)

    def run(self, prompt: Sequence[int], first: int, last: int, row: int, end: int) -> None:
        """Read the tokens first:last of a prompt, the last one at key end - 1 of its row, and make the logits of what
        comes next."""
        write, inputs, count = self.device.write, self._inputs, last - first
        begin, pad = row * self.slots.keys, self.width - count
        ids, positions = np.zeros(self.width, np.int32), np.zeros(self.width, np.int32)
        ids[pad:], positions[pad:] = prompt[first:last], np.arange(first, last)
        starts = np.full((1, self.width), begin + end - self.width, np.int32)
        starts[0, pad:] = begin + end - last
        for array, values in (
            (inputs.ids, ids),
            (inputs.positions, positions),
            (inputs.doc_start, starts),
            (inputs.cache_len, np.array([begin + end - self.width], np.int32)),
            (self._row, np.array([row], np.int32)),
        ):
            write(array, values)
        self._recorded(self._work)

    def _work(self) -> None:
        with no_grad():
            hidden = self.model.hidden(self._inputs, self._cache)
            one = F.embedding(hidden, self._last, dtype=hidden.dtype)
        self.slots.put_logits(self.model.logits(one.data), self._row)


class RecordedGroup:
    """Several prompts of up to `width` tokens each, read into a small cache of their own, from which each goes to its
    row. A group may have fewer prompts."""

    def __init__(self, model: Model, slots: SlotCache, count: int, width: int) -> None:
        device = model.device
        self.model, self.device, self.slots, self.count, self.width = model, device, slots, count, width
        self._inputs = Inputs(
            ids=device.zeros((count * width,), np.int32),
            positions=device.zeros((count * width,), np.int32),
            doc_start=device.zeros((count, width), np.int32),
            cache_len=device.zeros((1,), np.int32),
        )
        self._places = device.zeros((2 * count * _VIEW,), np.int32)  # of keys and of logits, each at a place of its own
        self._last = device.upload(np.arange(1, count + 1, dtype=np.int32) * width - 1)
        self._each = [device.upload(np.array([number], np.int32)) for number in range(count)]
        self._own = KVCache.empty(model.config, count, width, model.dtype, device)
        self._cache = slots.as_one_row()
        self._recorded = Recorded(device)

    def run(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], end: int) -> None:
        """Read them so that each ends at key end - 1 of its row, and make the logits of what comes next."""
        shape = (self.count, self.width)
        ids, positions, starts = (np.zeros(shape, np.int32) for _ in range(3))
        # Whom nobody takes goes past the end of the cache, where everything is left out.
        places = np.full((2, self.count, _VIEW), self.slots.rows * self.slots.keys, np.int32)
        for number, (prompt, row) in enumerate(zip(prompts, rows)):
            first = self.width - len(prompt)
            ids[number, first:], positions[number, first:], starts[number, first:] = prompt, range(len(prompt)), first
            places[0, number, 0], places[1, number, 0] = row * self.slots.keys + end - self.width, row
        self.device.write(self._inputs.ids, ids.reshape(-1))
        self.device.write(self._inputs.positions, positions.reshape(-1))
        self.device.write(self._inputs.doc_start, starts)
        self.device.write(self._places, places.reshape(-1))
        self._recorded(self._work)

    def _work(self) -> None:
        device, view = self.device, self.device.view
        with no_grad():
            hidden = self.model.hidden(self._inputs, self._own)
            last = F.embedding(hidden, self._last, dtype=hidden.dtype)
            logits = self.model.logits(last.data)
        for number in range(self.count):
            place, row = (view(self._places, (1,), (half * self.count + number) * _VIEW) for half in (0, 1))
            parts = ((self._own.keys, self._cache.keys), (self._own.values, self._cache.values))
            for own, cache in ((mine[layer], of_all[layer]) for mine, of_all in parts for layer in mine):
                size = (1, self.width, *own.shape[2:])
                device.kv_append(cache, view(own, size, number * own.size // self.count), place)
            self.slots.put_states(self._own, self._each[number], row)
            self.slots.put_logits(device.embedding(logits, self._each[number], dtype=np.float32), row)
