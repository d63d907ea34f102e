"""Every kernel of a batch of a server, launched once: for a dry run."""

from __future__ import annotations

import numpy as np

from wgrad.train.inference.continuous import CHUNK, Batch, padded
from wgrad.train.inference.growing import Growing
from wgrad.train.model.model import Model
from wgrad.train.options.generate_config import Sampling


def run_all_kernels(model: Model, rows: int, prompt_tokens: int, most_keys: int | None = None) -> None:
    """Do what launches each kernel of a batch of up to `rows` sequences, and takes the most memory."""
    batch, positions = Batch(model, rows, most_keys), model.positions
    sampling = Sampling(temperature=1.0)

    def grow(count: int, tokens: int, most: int) -> bool:
        """Have up to `count` more join, and all grow. Returns whether one has."""
        tokens = max(min(tokens, positions - most), 1)
        count = max(min(count, prompt_tokens // padded(tokens)), 1)
        newcomers = [Growing.begin([0] * tokens, most, sampling) for _ in range(count)]
        while newcomers and not batch.can_join(newcomers):
            newcomers.pop()
        if not newcomers:
            return False
        batch.join(newcomers)
        while batch.reads:
            batch.queue(1)
            batch.read_chunk()
        for number in range(3):
            if number == 2 and batch.growing:
                batch.growing[0].bias = np.zeros(model.config.vocab_size, np.float32)
            if batch.growing:
                batch.queue(1)
        return True

    most = min(64, max(positions // 2, 1))
    grow(1, positions, 3)
    width = padded(1)
    while width <= min(CHUNK, positions - most):
        grow(1, width, 1)
        grow(min(3, rows), width, 1)  # a group, where there are any of this width
        width *= 2
    batch.reset()
    while batch.free and grow(max(len(batch.members), 1), 1, most):
        pass
    long = Growing.begin([0] * max(positions - 3, 1), 3, sampling)
    while not batch.can_join([long]):
        batch.leave(batch.members[-1])
    grow(1, positions, 3)
