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
    batch, positions = Batch(model, rows, most_keys), model.positions
    sampling, numbers = Sampling(temperature=1.0), count()
    partner = copy(model)  # a model to mix with, if it mixes with any
    batch.reserve(rows, positions)

    def grow(wanted: int, tokens: int, most: int, first: int = 0) -> list[Growing]:
        """Let up to `wanted` sequences join, and all grow; return those that joined. first: their common tokens."""
        tokens = max(min(tokens, positions - most), 1)
        wanted = max(min(wanted, prompt_tokens // padded(tokens)), 1)
        vocab = model.config.vocab_size
        prompts = [[*[0] * first, *[(1 + next(numbers)) % vocab] * (tokens - first)] for _ in range(wanted)]
        newcomers = [Growing.begin(prompt, most, sampling) for prompt in prompts]
        while newcomers and not batch.can_join(newcomers):
            newcomers.pop()
        if not newcomers:
            return []
        batch.join(newcomers)
        while batch.reads:
            step()
            batch.read_chunk()
        for number in range(3):
            step(biased=number == 2)
        if model.mixed is not None:
            newcomers[0].model = partner
            step()
            newcomers[0].model = None
        return newcomers

    def step(biased: bool = False) -> None:
        leave(batch.crowded(1) if batch.growing else [])
        if biased and batch.growing:
            batch.growing[0].bias = np.zeros(model.config.vocab_size, np.float32)
            batch.growing[0].factors = np.ones(model.config.vocab_size, np.float32)
        if batch.growing:
            batch.queue(1)

    def leave(some: list[Growing]) -> None:
        for one in some:
            batch.leave(one)

    most = min(64, max(positions // 2, 1))
    leave(grow(1, positions, 3))
    width = padded(1)
    while width <= min(CHUNK, positions - most):
        leave(grow(1, width, 1))
        leave(grow(min(3, rows), width, 1))  # a group, if there are any of this width
        for number in (1, 3):
            if PAGE + width <= positions - most:
                leave(grow(min(number, rows), PAGE + width, 1, first=PAGE))
        width *= 2
    while batch.free and grow(max(len(batch.members), 1), 1, most):
        pass
    long = Growing.begin([1] * max(positions - 3, 1), 3, sampling)
    while not batch.can_join([long]):
        batch.leave(batch.members[-1])
    grow(1, positions, 3)
