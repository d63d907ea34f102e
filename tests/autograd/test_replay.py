"""The order in which work is run, recorded and replayed, on a device that writes down what it is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from wgrad.autograd.replay import Recorded
from wgrad.device.errors import DeviceLost


class Log:
    """A device of which each call is logged.

    limited: whether it rehearses. repeats: whether it need not record. lost: the recording that it is lost in.
    """

    def __init__(self, limited: bool = False, repeats: bool = False, lost: int = 0) -> None:
        self.limited, self.repeats, self.lost, self.log, self.parts = limited, repeats, lost, list[str](), 0
        self._recordings = list[Any]()  # so that none ends because nobody has it any more

    def synchronize(self) -> None:
        self.log.append("wait")

    @contextmanager
    def rehearse(self) -> Iterator[Any]:
        self.log.append("rehearse")
        yield "R" if self.limited else None
        self.log.append("rehearsed")

    def repeat(self, rehearsal: Any) -> bool:
        self.log.append(f"repeat {rehearsal}")
        return self.repeats

    def capture(self, rehearsal: Any) -> Any:
        self._recordings.append(self._capture(rehearsal))
        return self._recordings[-1]

    @contextmanager
    def _capture(self, rehearsal: Any) -> Iterator[Any]:
        self.parts += 1
        name = f"part {self.parts}" + f" in {rehearsal}" * (rehearsal is not None)
        self.log.append(f"record {name}")
        try:
            yield SimpleNamespace(run=lambda: self.log.append(f"run {name}"), dispatches=10**self.parts)
        finally:
            self.log.append(f"recorded {name}")
            if self.parts == self.lost:
                raise DeviceLost("lost")

    def told(self) -> list[str]:
        found, self.log = self.log, []
        return found


def work(device: Log, recorded: Recorded, cuts: int = 0, fails_at: int | None = None) -> Callable[[], None]:
    """Return work in parts. fails_at: part in which it fails."""

    def run() -> None:
        for part in range(cuts + 1):
            if part:
                recorded.cut()
            device.log.append(f"work {part}")
            if part == fails_at:
                raise KeyboardInterrupt

    return run


@pytest.mark.parametrize("limited", [False, True])
def test_work_runs_then_is_recorded_then_replayed(limited: bool) -> None:
    device = Log(limited)
    recorded: Any = Recorded(device)  # type: ignore[arg-type]
    submitted = list[Any]()
    assert recorded.is_rehearsal and recorded.dispatches == 0
    recorded(work(device, recorded, cuts=2), submitted.append)
    assert device.told() == ["wait", "rehearse", "work 0", "work 1", "work 2", "rehearsed"]
    assert not recorded.is_rehearsal and recorded.dispatches == 0
    first, repeat = ("part 1 in R", ["repeat R"]) if limited else ("part 1", [])
    recorded(work(device, recorded, cuts=2), submitted.append)
    assert device.told() == [
        *(f"record {first}", *repeat, "work 0", f"recorded {first}"),
        *("record part 2", "work 1", "recorded part 2"),
        *("record part 3", "work 2", "recorded part 3"),
    ]
    assert recorded.dispatches == 1110 and not submitted
    recorded(work(device, recorded), lambda number: device.log.append(f"submitted {number}"))
    whole = [f"run {first}", "submitted 0", "run part 2", "submitted 1", "run part 3", "submitted 2"]
    assert device.told() == whole
    recorded.cut()  # nothing is recorded
    recorded(work(device, recorded))
    assert device.told() == whole[::2] and recorded.dispatches == 1110


def test_a_dry_run_that_repeats_a_rehearsal_does_no_work() -> None:
    device = Log(limited=True, repeats=True)
    recorded: Any = Recorded(device)  # type: ignore[arg-type]
    for _ in range(3):
        recorded(work(device, recorded))
    recording = ["record part 1 in R", "repeat R", "recorded part 1 in R"]
    assert device.told() == ["wait", "rehearse", "work 0", "rehearsed", *recording, "run part 1 in R"]


def test_work_that_fails_is_run_or_recorded_again() -> None:
    device = Log(limited=True)
    recorded: Any = Recorded(device)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        recorded(work(device, recorded, fails_at=0))
    assert recorded.is_rehearsal
    recorded(work(device, recorded, cuts=1))
    device.told()
    with pytest.raises(KeyboardInterrupt):
        recorded(work(device, recorded, cuts=1, fails_at=1))
    assert device.told()[-3:] == ["record part 2", "work 1", "recorded part 2"] and recorded.dispatches == 0
    recorded(work(device, recorded, cuts=1))
    again = ["record part 3", "work 0", "recorded part 3", "record part 4", "work 1", "recorded part 4"]
    assert device.told() == again and recorded.dispatches == 11_000
    recorded(work(device, recorded))
    assert device.told() == ["run part 3", "run part 4"]


def test_a_device_lost_as_a_part_ends_is_told() -> None:
    device = Log(lost=1)
    recorded: Any = Recorded(device)  # type: ignore[arg-type]
    recorded(work(device, recorded, cuts=1))
    with pytest.raises(DeviceLost):
        recorded(work(device, recorded, cuts=1))
    assert recorded.dispatches == 0 and device.told().count("recorded part 1") == 1
