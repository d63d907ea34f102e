"""Device work that repeats: recorded once, replayed from then on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from wgrad.device.contract import Device, Replay


class Recorded:
    """Device work of unchanged shapes: run as it is the first time, recorded the second, replayed from then on.

    The first run compiles the pipelines and grows the memory pool, so that the recording holds neither. The work is
    given at each call and not kept: a kept method of the owner would be a cycle, and hold the owner's device memory.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._runs = 0
        self._replays: list[Replay] = []
        self._capture: ExitStack | None = None
        self._rehearsal: Any = None

    @property
    def dispatches(self) -> int:
        """Launches of the recording; 0 before there is one."""
        return sum(replay.dispatches for replay in self._replays)

    def __call__(self, work: Callable[[], None], submitted: Callable[[int], None] | None = None) -> None:
        """submitted: called in a replay after each part (`cut`) with its number, while the device has yet to do it."""
        if self._runs > 1:
            for number, replay in enumerate(self._replays):
                replay.run()
                if submitted is not None:
                    submitted(number)
            return
        if self._runs:
            self._begin()
            try:
                work()
            except BaseException:
                self._end()
                self._replays.clear()  # half of the work: the next call records all of it
                raise
            self._end()
        else:
            self._device.synchronize()  # so that this run alone shows how fast the device is
            with self._device.rehearse() as self._rehearsal:
                work()
        self._runs += 1

    def cut(self) -> None:
        """Called by the work: what it does from here on is another part of the recording."""
        if self._capture is not None:
            self._end()
            self._begin()

    def _begin(self) -> None:
        self._capture = ExitStack()
        # Of work in several parts the first has what was rehearsed; the others find its memory free.
        rehearsal, self._rehearsal = self._rehearsal, None
        self._replays.append(self._capture.enter_context(self._device.capture(rehearsal)))

    def _end(self) -> None:
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.close()
