"""Submissions that the device has not finished: what they launch, and how long to wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wgrad.device.bounded import LOOK, TIMEOUT, timeout
from wgrad.device.errors import DeviceError, DeviceHung
from wgrad.wgsl.runtime.native import as_device_error
from wgrad.wgsl.runtime.submit_thread import Submitted

_SECONDS, _SOFTWARE_SECONDS = 120.0, 1800.0
# Work per second of a device whose rate is not known, and how many times longer than by the measured rate it may take:
# some launches are memory-bound, and other programs may use the device. A GPU slower than the former by far looks as if
# it hangs: nothing tells the two apart before the end of a submission, and a smaller first one would split the recorded
# dispatches for good. Its driver's watchdog ends it first.
_LEAST_RATE, _SOFTWARE_LEAST_RATE, _SLOWER = 1e9, 1e7, 100.0
# Submissions count as short if all take at most so many seconds, at this rate or the measured one if that is higher.
_SHORT_SECONDS, _USUAL_RATE = 0.2, 2e12
_NAMES = 3  # of launches, in a message


@dataclass
class Flight:
    """A submission. names: of its launches. work: as in SubmissionSize."""

    number: int
    submitted: Submitted
    names: Sequence[str]
    work: float


class InFlight:
    """Submissions in flight, in their order.

    rate: returns the work per second of the device (SubmissionSize), 0 while unknown.
    doing: what the submit thread is doing, for messages.
    """

    def __init__(self, software: bool) -> None:
        self._software = software
        self.rate: Callable[[], float] = lambda: 0.0
        self._flights: deque[Flight] = deque()
        self._made = self._finished = 0
        self._seconds = timeout(_SOFTWARE_SECONDS if software else _SECONDS)
        self.doing = "submitting commands"

    def __len__(self) -> int:
        return len(self._flights)

    def add(self, submitted: Submitted, names: Sequence[str] = (), work: float = 0.0) -> None:
        self._made += 1
        self._flights.append(Flight(self._made, submitted, names, work))

    def oldest(self, count: int) -> list[Flight]:
        return list(self._flights.copy())[:count]

    def finished(self, flight: Flight) -> None:
        """Mark a submission, and those before it, as finished. Any thread may call it."""
        while self._flights and self._flights[0].number <= flight.number:
            self._flights.popleft()
        self._finished = flight.number

    def clear(self) -> None:
        self._flights.clear()

    @property
    def are_short(self) -> bool:
        """Return whether all together take the device little time, as the steps of decoding do."""
        work = sum(flight.work for flight in self._flights.copy())
        return not self._software and work < _SHORT_SECONDS * max(self.rate(), _USUAL_RATE)

    @property
    def limit(self) -> float:
        """Seconds without a finished submission after which the device counts as hanging."""
        least = _SOFTWARE_LEAST_RATE if self._software else _LEAST_RATE
        work = max((flight.work for flight in self._flights.copy()), default=0.0)
        return self._seconds + work / max(self.rate() / _SLOWER, least)

    def wait(self, given: Submitted) -> None:
        """Wait for a task of the submit thread. Raises DeviceHung once the device has finished nothing for too long."""
        seconds, finished = 0.0, self._finished
        while not given.wait(LOOK):
            # Looks are counted, not the clock's seconds: this process may have been stopped between two of them.
            seconds += LOOK
            if finished != self._finished:
                seconds, finished = 0.0, self._finished
            if seconds >= self.limit:
                raise DeviceHung(
                    f"the device hangs: nothing that was submitted was finished for {seconds:.0f} s while {self.doing}"
                    f"{self.launches()}. If it is only slow, set {TIMEOUT}={2 * seconds:.0f}"
                )

    def launches(self) -> str:
        """The launches that the device may be at, for a message, or ""."""
        names = [name for flight in self._flights.copy() for name in flight.names]
        shown = list(dict.fromkeys(names))
        if not shown:
            return ""
        more = f" and {len(shown) - _NAMES} more kernels" * (len(shown) > _NAMES)
        return f" (launches in flight: {', '.join(shown[:_NAMES])}{more})"

    def lost(self) -> DeviceError:
        """The error of a task in which the device was found to be lost."""
        return as_device_error("the device is lost", self.doing + self.launches())
