"""How fast a run goes, from when its steps were finished on the device.

A device works behind the host: a step that was submitted is finished later, and the host learns of several at a time.
So what counts is never when a step was submitted or how long ago the last report came, but how many steps lie between
two moments at which the host looked, over a window long enough that looking a little late does not matter.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

WINDOW_SECONDS = 2.0  # tokens/s is over at least this long
WINDOW_LOOKS = 4  # and over as many looks


class _Look(NamedTuple):
    """Progress at one moment, since `start`."""

    seconds: float
    steps: int
    tokens: int


class Throughput:
    """Tokens a second (over a window) and seconds a step (over the whole run). clock: seconds, rising."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.start()

    def start(self) -> None:
        """The first step begins now."""
        self._begun, self._paused = self._clock(), 0.0
        self._looks: deque[_Look] = deque([_Look(0.0, 0, 0)])
        self._first: _Look | None = None  # after the first steps, which may still have compiled or recorded something

    def _now(self) -> float:
        return self._clock() - self._begun - self._paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the block's time, which is not training. No step is under way at its begin."""
        begun = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - begun

    def finished(self, steps: int, tokens: int) -> None:
        """The host sees now that `steps` more steps, of `tokens` tokens together, are finished."""
        last, now = self._looks[-1], self._now()
        look = _Look(now, last.steps + steps, last.tokens + tokens)
        if now <= last.seconds and len(self._looks) > 1:  # the same look
            self._looks.pop()
            self._first = None if self._first == last else self._first
        self._looks.append(look)
        self._first = self._first or look
        while len(self._looks) > WINDOW_LOOKS + 1 and now - self._looks[1].seconds >= WINDOW_SECONDS:
            self._looks.popleft()

    @property
    def tokens_per_second(self) -> float:
        """Over the last few looks and at least the last two seconds, where there are so many; 0 before the first."""
        first, last = self._looks[0], self._looks[-1]
        return (last.tokens - first.tokens) / max(last.seconds - first.seconds, 1e-9) if len(self._looks) > 1 else 0.0

    @property
    def seconds_per_step(self) -> float:
        """The mean, without the first steps where there are others; infinity before the first."""
        last, first = self._looks[-1], self._first
        if first is None:
            return math.inf
        if last.steps == first.steps:
            return first.seconds / max(first.steps, 1)
        return (last.seconds - first.seconds) / (last.steps - first.steps)
