"""Launching every kernel of a server's batch once, for a dry run."""

from __future__ import annotations

from copy import copy
from itertools import count

import numpy as np

from wgrad.device.contract import PAGE
from wgrad.train.inference.continuous import CHUNK, Batch, padded
from wgrad.train.inference.growing import Growing
from wgrad.train.model.model import Model
from wgrad.train.options.generate_config import Sampling


def run_all_kernels(model: Model, rows: int, prompt_tokens: int, most_keys: int | None = None) -> None:
    """Run a batch of up to `rows` sequences so that it launches each kernel, and takes the most memory."""
    positions = model.positions
    dry = _DryBatch(Batch(model, rows, most_keys), prompt_tokens)
    dry.batch.reserve(rows, positions)
    most = min(64, max(positions // 2, 1))
    dry.leave(dry.grow(1, positions, 3))
    width = padded(1)
    while width <= min(CHUNK, positions - most):
        dry.leave(dry.grow(1, width, 1))
        dry.leave(dry.grow(min(3, rows), width, 1))  # a group, if there are any of this width
        for number in (1, 3):
            if PAGE + width <= positions - most:
                dry.leave(dry.grow(min(number, rows), PAGE + width, 1, first=PAGE))
        width *= 2
    while dry.batch.free and dry.grow(max(len(dry.batch.members), 1), 1, most):
        pass
    dry.make_room_for_the_longest()
    dry.grow(1, positions, 3)


class _DryBatch:
    """A batch, and sequences that join, grow in and leave it."""

    def __init__(self, batch: Batch, prompt_tokens: int) -> None:
        """prompt_tokens: of all prompts that may join together, padded."""
        self.batch, self.model, self.prompt_tokens = batch, batch.model, prompt_tokens
        self._partner = copy(self.model)  # a model to mix with, if it mixes with any
        self._sampling, self._numbers = Sampling(temperature=1.0), count()

    def grow(self, wanted: int, tokens: int, most: int, first: int = 0) -> list[Growing]:
        """Let up to `wanted` sequences join, and all grow; return those that joined. first: their common tokens."""
        batch = self.batch
        newcomers = self._newcomers(wanted, max(min(tokens, self.model.positions - most), 1), most, first)
        while newcomers and not batch.can_join(newcomers):
            newcomers.pop()
        if not newcomers:
            return []
        batch.join(newcomers)
        while batch.reads:
            self._step()
            batch.read_chunk()
        for number in range(3):
            self._step(biased=number == 2)
        if self.model.mixed is not None:
            newcomers[0].model = self._partner
            self._step()
            newcomers[0].model = None
        return newcomers

    def _newcomers(self, wanted: int, tokens: int, most: int, first: int) -> list[Growing]:
        wanted, vocab = max(min(wanted, self.prompt_tokens // padded(tokens)), 1), self.model.config.vocab_size
        prompts = [[*[0] * first, *[(1 + next(self._numbers)) % vocab] * (tokens - first)] for _ in range(wanted)]
        return [Growing.begin(prompt, most, self._sampling) for prompt in prompts]

    def _step(self, biased: bool = False) -> None:
        batch, vocab = self.batch, self.model.config.vocab_size
        self.leave(batch.crowded(1) if batch.growing else [])
        if biased and batch.growing:
            batch.growing[0].bias = np.zeros(vocab, np.float32)
            batch.growing[0].factors = np.ones(vocab, np.float32)
        if batch.growing:
            batch.queue(1)

    def leave(self, some: list[Growing]) -> None:
        for one in some:
            self.batch.leave(one)

    def make_room_for_the_longest(self) -> None:
        """Let sequences leave until one of all positions can join."""
        longest = Growing.begin([1] * max(self.model.positions - 3, 1), 3, self._sampling)
        while not self.batch.can_join([longest]):
            self.batch.leave(self.batch.members[-1])
