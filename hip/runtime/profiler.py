"""Times per kernel, from pairs of events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from wgrad.device import kernel_times
from wgrad.device.kernel_times import BATCH
from wgrad.hip.runtime.binding import check, wait_for_event


class Profiler(kernel_times.Profiler):
    """Records an event before and after each launch."""

    def __init__(self, hip: Any, stream: Any) -> None:
        super().__init__()
        self._hip, self._stream = hip, stream
        self._events: list[Any] = []

    def before(self, name: str) -> None:
        if len(self._names) == BATCH:
            self.collect()
        self._names.append(name)
        self._record(2 * len(self._names) - 2)

    def after(self) -> None:
        self._record(2 * len(self._names) - 1)

    def _record(self, at: int) -> None:
        if at == len(self._events):
            self._events.append(check(self._hip.hipEventCreate(), "hipEventCreate"))
        check(self._hip.hipEventRecord(self._events[at], self._stream), "hipEventRecord")

    def _times(self) -> Iterable[float]:
        events = self._events[: 2 * len(self._names)]
        wait_for_event(self._hip, events[-1], "hipEventSynchronize")
        for start, end in zip(events[0::2], events[1::2]):
            yield 1e6 * check(self._hip.hipEventElapsedTime(start, end), "hipEventElapsedTime")
