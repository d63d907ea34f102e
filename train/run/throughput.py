"""Speed of a run, measured from the steps that the device has finished.

The device works asynchronously: a submitted step finishes later, and the host learns of several at a time. So the rate
is the number of steps between two looks at the device, over a window long enough that a late look does not matter.
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
    """Progress since `start`, as the host saw it at one moment."""

    seconds: float
    steps: int
    tokens: int


class Throughput:
    """Measures tokens per second (over a window) and seconds per step (over the whole run).

    clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.start()

    def start(self) -> None:
        """Start measuring: the first step begins now."""
        self._begun, self._paused = self._clock(), 0.0
        self._looks: deque[_Look] = deque([_Look(0.0, 0, 0)])
        self._first: _Look | None = None  # after the first steps, which may still have compiled or recorded something

    def _now(self) -> float:
        return self._clock() - self._begun - self._paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the block's time. No step may be running when it begins."""
        begun = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - begun

    def finished(self, steps: int, tokens: int) -> None:
        """Record that `steps` more steps, with `tokens` tokens in all, have finished."""
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
        """Rate over the last few looks, spanning at least two seconds if the run is that long; 0 before the first."""
        first, last = self._looks[0], self._looks[-1]
        return (last.tokens - first.tokens) / max(last.seconds - first.seconds, 1e-9) if len(self._looks) > 1 else 0.0

    @property
    def seconds_per_step(self) -> float:
        """Mean time of a step, without the first ones if there are others; infinity before the first."""
        last, first = self._looks[-1], self._first
        if first is None:
            return math.inf
        if last.steps == first.steps:
            return first.seconds / max(first.steps, 1)
        return (last.seconds - first.seconds) / (last.steps - first.steps)
