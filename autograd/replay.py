"""Record repeated device work once, and replay it from then on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from wgrad.device.contract import Device, Replay


class Repeated:
    """Device work with constant shapes that is run each time. A dry run takes its memory again in place of the work."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._rehearsal: Any = None

    def __call__(self, work: Callable[[], None]) -> None:
        """Run the work."""
        if self._rehearsal is None or not self._device.repeat(self._rehearsal):
            with self._device.rehearse() as self._rehearsal:
                work()


class Recorded:
    """Device work with constant shapes: run directly the first time, recorded the second time, replayed from then on.

    The first run compiles pipelines and grows the memory pool, so that the recording includes neither. The work is
    passed at each call and not kept, because a method of the owner would be a reference cycle that keeps its device
    memory alive.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._runs = 0
        self._replays: list[Replay] = []
        self._capture: ExitStack | None = None
        self._rehearsal: Any = None

    @property
    def dispatches(self) -> int:
        """Launches of the recording; 0: there is none yet."""
        return sum(replay.dispatches for replay in self._replays)

    @property
    def is_rehearsal(self) -> bool:
        """Return whether the work runs, or is about to run, without a recording."""
        return self._runs == 0

    def __call__(self, work: Callable[[], None], submitted: Callable[[int], None] | None = None) -> None:
        """Run, record or replay the work.

        submitted: called in a replay with the number of each part (`cut`) after it was submitted to the device.
        """
        if self._runs > 1:
            for number, replay in enumerate(self._replays):
                replay.run()
                if submitted is not None:
                    submitted(number)
            return
        if self._runs:
            rehearsal = self._rehearsal
            self._begin()
            try:
                if rehearsal is None or not self._device.repeat(rehearsal):
                    work()
            except BaseException:
                self._end()
                self._replays.clear()  # incomplete: the next call records again
                raise
            self._end()
        else:
            self._device.synchronize()  # so that the device can measure this run alone
            with self._device.rehearse() as self._rehearsal:
                work()
        self._runs += 1

    def cut(self) -> None:
        """Begin another part of the recording. The work calls this."""
        if self._capture is not None:
            self._end()
            self._begin()

    def _begin(self) -> None:
        self._capture = ExitStack()
        # The first part uses the rehearsal; the others find its memory free.
        rehearsal, self._rehearsal = self._rehearsal, None
        self._replays.append(self._capture.enter_context(self._device.capture(rehearsal)))

    def _end(self) -> None:
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.close()
