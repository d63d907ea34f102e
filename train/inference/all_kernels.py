"""Every kernel of a batch of a server, launched once: for a dry run."""

from __future__ import annotations

from wgrad.train.inference.continuous import CHUNK, Batch, padded
from wgrad.train.inference.growing import Growing
from wgrad.train.model.model import Model
from wgrad.train.options.generate_config import Sampling


def run_all_kernels(model: Model, rows: int, prompt_tokens: int, most_keys: int | None = None) -> None:
    """Do what launches each kernel of a batch of up to `rows` sequences, and takes the most memory."""
    batch, positions = Batch(model, rows, most_keys), model.positions
    sampling = Sampling(temperature=1.0)

    def grow(count: int, tokens: int, most: int) -> None:
        tokens = max(min(tokens, positions - most), 1)
        left = count
        while left:
            now = max(min(left, prompt_tokens // padded(tokens)), 1)
            batch.join([Growing.begin([0] * tokens, most, sampling) for _ in range(now)])
            while batch.reads:
                batch.queue(1)
                batch.read_chunk()
            left -= now
        for _ in range(3):
            if batch.growing:
                batch.queue(1)

    most = min(64, max(positions // 2, 1))
    grow(1, positions, 3)
    batch.reset()
    width = padded(1)
    while width <= min(CHUNK, positions - most):
        grow(1, width, 1)
        grow(min(3, rows), width, 1)  # a group, where there are any of this width
        width *= 2
    while batch.free:
        grow(max(len(batch.members), 1) if len(batch.members) * 2 <= rows else batch.free, 1, most)
    batch.leave(batch.members[-1])
    long = Growing.begin([0] * max(positions - 3, 1), 3, sampling)
    while not batch.can_join([long]):
        batch.leave(batch.members[-1])
    grow(1, positions, 3)
