"""Recordings of a batch, made before the first request comes: those of short prompts and of few sequences."""

from __future__ import annotations

import time
from collections.abc import Iterator

from wgrad.train.inference.continuous import CHUNK, FEW, GROUP, GROUP_TOKENS, PROMPT_STEP, Batch
from wgrad.train.inference.growing import Growing
from wgrad.train.options.generate_config import GREEDY

_ROWS, _KEYS = 16, 1024  # of the cache: it grows beyond them, and then all is recorded anew
_STEPS = 2


def warm_up(batch: Batch, seconds: float) -> None:
    """Record what is needed most; no more of it once so many seconds have passed. The batch must be empty."""
    end = time.monotonic() + seconds
    rows = batch.reserve(_ROWS, min(_KEYS, batch.model.positions))
    longest = min(CHUNK, batch.model.positions - _STEPS)
    for count, tokens in _shapes(rows, longest):
        for _ in range(2):  # the first run is not recorded, the second one is
            newcomers = [Growing.begin([0] * tokens, _STEPS, GREEDY) for _ in range(count)]
            if time.monotonic() > end or not batch.can_join(newcomers):
                return
            batch.join(newcomers)
            batch.queue(_STEPS).tokens()


def _shapes(rows: int, longest: int) -> Iterator[tuple[int, int]]:
    """Yield numbers of sequences, and tokens of their prompts."""
    count = 1
    while count < rows:
        yield count, min(PROMPT_STEP, longest)
        count *= 2
    yield rows, min(PROMPT_STEP, longest)
    tokens = 2 * PROMPT_STEP
    while tokens <= longest:
        yield 1, tokens
        if GROUP * tokens <= GROUP_TOKENS and rows > FEW:
            yield FEW + 1, tokens
        tokens *= 2
