"""How much of what is recorded goes into one submission."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# A submission takes about 45 us of the host, as ten dispatches do, and a driver's watchdog allows 2 s for one. The
# device starts only when it is submitted, so the first one behind a wait, or of a replay, is short.
FIRST_DISPATCHES, MAX_DISPATCHES = 128, 512
_LEAST_WORK = {"CPU": 2e9, "IntegratedGPU": 2e10}  # by the type of the adapter
_LEAST_WORK_GPU, _LEAST_WORK_MATRIX_UNITS = 2e11, 2e12
_SECONDS, _MOST_WORK = 0.05, 2e12


@dataclass(frozen=True)
class Submission:
    """Commands that are submitted together. work: as of SubmissionSize. apart: it begins with a copy that runs beside
    its first large launch only there (transfers.py)."""

    dispatches: list[Any]
    names: list[str]
    work: float
    apart: bool


def joined(submissions: Iterable[Submission], work: float) -> list[Submission]:
    """The same dispatches in as few submissions as `work` and MAX_DISPATCHES allow; the first stays as it is."""
    result: list[Submission] = []
    for new in submissions:
        last = result[-1] if len(result) > 1 else None
        fits = last is not None and len(last.dispatches) + len(new.dispatches) <= MAX_DISPATCHES
        if last is None or new.apart or not fits or last.work + new.work > work:
            result.append(new)
        else:
            both = last.dispatches + new.dispatches, last.names + new.names, last.work + new.work
            result[-1] = Submission(*both, last.apart)
    return result


class SubmissionSize:
    """work: after how much a submission ends, in FLOP, or in bytes where memory is what counts. At first what the
    slowest device of its kind does in time; later what this one was seen to do in 50 ms."""

    def __init__(self, adapter_type: str, matrix_units: bool) -> None:
        self.work = _LEAST_WORK.get(adapter_type, _LEAST_WORK_MATRIX_UNITS if matrix_units else _LEAST_WORK_GPU)
        self._begun: float | None = None  # when the first submission was made behind a wait
        self._submitted = 0.0

    def submitted(self, work: float) -> None:
        if self._begun is None:
            self._begun, self._submitted = time.perf_counter(), 0.0
        self._submitted += work

    def waited(self) -> None:
        """The device has done all that was submitted, in the time since then or less: the host recorded in it, too.
        What a replay submits is not counted, which only makes the device look slower."""
        if self._begun is None:
            return
        seconds, self._begun = time.perf_counter() - self._begun, None
        if self._submitted >= self.work:  # so much that what else takes time matters little
            self.work = max(self.work, min(self._submitted / seconds * _SECONDS, _MOST_WORK))
