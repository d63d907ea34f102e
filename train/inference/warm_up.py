"""Making recordings of a batch before the first request arrives: those of short prompts and few sequences."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count

from wgrad.device.errors import OutOfMemory
from wgrad.train.inference.continuous import CHUNK, FEW, GROUP, GROUP_TOKENS, PROMPT_STEP, Batch
from wgrad.train.inference.growing import Growing
from wgrad.train.options.generate_config import GREEDY

# Size of a cache whose rows have states, or for which memory is short. It grows later, and all is recorded again.
_ROWS, _KEYS = 16, 1024
_STEPS = 2


def warm_up(batch: Batch, seconds: float) -> None:
    """Record the most frequent steps, for at most `seconds`. The batch must be empty.

    The cache gets all of its pages, since growing it later would copy it, and record all steps again, while requests
    wait.
    """
    end = time.monotonic() + seconds
    try:
        rows = batch.reserve(batch.rows if batch.model.config.linear is None else _ROWS)
    except OutOfMemory:  # other programs use the memory
        rows = batch.reserve(_ROWS, min(_KEYS, batch.model.positions))
    longest, vocab = min(CHUNK, batch.model.positions - _STEPS), batch.model.config.vocab_size
    numbers = count()  # no prompt begins like another, or it would share its pages
    for sequences, tokens in _shapes(rows, longest):
        for _ in range(2):  # the first run is not recorded, the second one is
            prompts = [[next(numbers) % vocab] * tokens for _ in range(sequences)]
            newcomers = [Growing.begin(prompt, _STEPS, GREEDY) for prompt in prompts]
            if time.monotonic() > end or not batch.can_join(newcomers):
                return
            batch.join(newcomers)
            batch.queue(_STEPS).tokens()
            batch.device.synchronize()  # measures the device's speed, which decides how recordings are submitted


def _shapes(rows: int, longest: int) -> Iterator[tuple[int, int]]:
    """Yield numbers of sequences, and tokens of their prompts."""
    yield 1, 1 << (longest.bit_length() - 1)
    some, shortest = 1, min(PROMPT_STEP, longest)
    while some < min(rows, _ROWS):
        yield some, shortest
        some *= 2
    some = min(rows, _ROWS)
    yield some, shortest
    tokens = 2 * PROMPT_STEP
    while tokens <= longest:
        yield 1, tokens
        if GROUP * tokens <= GROUP_TOKENS and rows > FEW:
            yield FEW + 1, tokens
        tokens *= 2
    while some < rows:
        some = min(2 * some, rows)
        yield some, shortest
