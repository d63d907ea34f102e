"""Device work that repeats: recorded once, replayed from then on."""

from __future__ import annotations

from collections.abc import Callable

from wgrad.device.contract import Device, Replay


class Recorded:
    """Device work of unchanged shapes: run as it is the first time, recorded the second, replayed from then on.

    The first run compiles the pipelines and grows the memory pool, so that the recording holds neither. The work is
    given at each call and not kept: a kept method of the owner would be a cycle, and hold the owner's device memory.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._runs = 0
        self._replay: Replay | None = None

    @property
    def dispatches(self) -> int:
        """Launches of the recording; 0 before there is one."""
        return 0 if self._replay is None else self._replay.dispatches

    def __call__(self, work: Callable[[], None]) -> None:
        if self._replay is not None:
            self._replay.run()
            return
        if self._runs:
            with self._device.capture() as replay:
                work()
            self._replay = replay
        else:
            work()
        self._runs += 1
