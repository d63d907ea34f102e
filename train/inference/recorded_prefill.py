"""Reading a prompt, or a part of one, recorded once for each width."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.replay import Recorded
from wgrad.autograd.tensor import no_grad
from wgrad.train.inference.slot_cache import SlotCache
from wgrad.train.model.model import Inputs, Model


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
        self._last = device.upload(np.array([width - 1], np.int32))
        self._cache = slots.as_one_row()
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
