"""Limits on the work of one submission and of one dispatch, from the measured rate of the device."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wgrad.device.cache import keep, read_kept

# A submission costs the host about 45 us, as much as ten dispatches, and a driver's watchdog allows 2 s for one. The
# device starts only when it is submitted, so the first one after a wait, or of a replay, is short.
FIRST_DISPATCHES, MAX_DISPATCHES = 128, 512
# Work allowed while the rate is unknown, by adapter type: GPUs of 0.5 and 0.1 TFLOP/s take 200 ms for it. A software
# driver has no watchdog, so its dispatches need no limit.
_LEAST_WORK, LEAST_WORK_GPU = {"CPU": 2e9, "IntegratedGPU": 2e10}, 1e11
_SECONDS, _MOST_WORK = 0.05, 2e12
_DISPATCH_SECONDS = 0.2
_MOST_RATE = 1e16  # a clock that says more is wrong
_FORMAT, _MOST_BYTES = 1, 1 << 12


@dataclass(frozen=True)
class Submission:
    """Commands that are submitted together.

    work: as in SubmissionSize. apart: it begins with a copy that overlaps with its first large launch only at the start
    of a submission (transfers.py).
    """

    dispatches: list[Any]
    names: list[str]
    work: float
    apart: bool


def joined(submissions: Iterable[Submission], work: float) -> list[Submission]:
    """Merge submissions as far as `work` and MAX_DISPATCHES allow; the first stays as it is."""
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
    """Limits on the work that the device gets at once, in FLOP, or bytes for memory-bound launches.

    work: of a submission. At first what the slowest device of its kind does in time, later what this one does in 50 ms.
    dispatch_work: of a dispatch, likewise in 200 ms.
    kept: cache file with the rate of this GPU in an earlier process.
    """

    def __init__(self, adapter_type: str, kept: Path | None = None) -> None:
        least = _LEAST_WORK.get(adapter_type, LEAST_WORK_GPU)
        self.work, self.dispatch_work = least, math.inf if adapter_type == "CPU" else least
        self._file = None if adapter_type == "CPU" else kept
        self._share = 1.0  # of what the rate allows; less after a loss of the device
        self.rate = 0.0  # highest measured work per second; 0: none yet
        self._begun: float | None = None  # time of the first submission after a wait
        self._submitted = 0.0
        if self._file is not None:
            self._take(_kept_rate(self._file))

    def _take(self, rate: float) -> None:
        """Use this rate, if it is the highest so far."""
        if not self.rate < rate <= _MOST_RATE:
            return
        self.rate = rate
        self.work = max(self.work, self._share * min(rate * _SECONDS, _MOST_WORK))
        self.dispatch_work = max(self.dispatch_work, self._share * rate * _DISPATCH_SECONDS)

    def lower(self, share: float) -> None:
        """Give the device only this share of what its rate allows."""
        self.work, self.dispatch_work = share * self.work, share * self.dispatch_work
        self._share = share

    def submitted(self, work: float) -> None:
        if self._begun is None:
            self._begun, self._submitted = time.perf_counter(), 0.0
        self._submitted += work

    def waited(self) -> None:
        """Update the rate: the device has done all that was submitted since the last wait.

        The time includes the host's recording, and work of replays is not counted, so the rate may be too low.
        """
        if self._begun is None:
            return
        seconds, self._begun = time.perf_counter() - self._begun, None
        if self._submitted < self.work:  # too little: other costs would matter
            return
        before = self.rate
        self._take(self._submitted / max(seconds, 1e-9))
        if self._file is not None and self.rate > 1.1 * before:
            with suppress(OSError):  # measured again next time
                keep(self._file, json.dumps({"format": _FORMAT, "rate": self.rate}).encode())


def _kept_rate(file: Path) -> float:
    """Return the rate that was kept, 0 where there is none."""
    try:
        kept = json.loads(read_kept(file, _MOST_BYTES))
        return float(kept["rate"]) if kept["format"] == _FORMAT else 0.0
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0.0
