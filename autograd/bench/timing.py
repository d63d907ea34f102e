"""Timing of work on a device: a recording of a few calls is replayed many times after a warm-up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from wgrad.device.contract import Device

WARM_SECONDS = 0.5  # an idle GPU needs this long to reach its clock
SAMPLES, FEWEST_SAMPLES = 7, 3
SAMPLE_SECONDS = 0.03
_MOST_SECONDS = 4.0  # of all samples: long work has fewer samples
_MOST_CALLS = 50  # calls in a recording


class Time(NamedTuple):
    """Seconds of a call, the median of the samples, and their spread: (largest - smallest) / median."""

    seconds: float
    spread: float


def median_spread(samples: list[float]) -> Time:
    mid = statistics.median(samples)
    return Time(mid, (max(samples) - min(samples)) / mid)


def time_device(device: Device, work: Callable[[], Any], warm_up: float = WARM_SECONDS) -> Time:
    """Time work on a device. Short work is recorded several times, so that the cost of a submission is negligible."""
    work()
    device.synchronize()
    start = time.perf_counter()
    work()
    device.synchronize()
    once = time.perf_counter() - start
    calls = _MOST_CALLS if once < 0.002 else max(1, min(_MOST_CALLS, round(0.003 / once)))
    with device.capture() as replay:
        for _ in range(calls):
            work()
    per_run = _warm(device, replay, warm_up)
    inner = max(1, round(SAMPLE_SECONDS / per_run))
    samples: list[float] = []
    for _ in range(max(FEWEST_SAMPLES, min(SAMPLES, int(_MOST_SECONDS / (inner * per_run))))):
        start = time.perf_counter()
        for _ in range(inner):
            replay.run()
        device.synchronize()
        samples.append((time.perf_counter() - start) / inner / calls)
    return median_spread(samples)


def _warm(device: Device, replay: Any, seconds: float) -> float:
    """Replay for `seconds`, at least once. Return the seconds of a replay."""
    start, runs = time.perf_counter(), 0
    while runs == 0 or time.perf_counter() - start < seconds:
        replay.run()
        runs += 1
        if runs % 20 == 0:
            device.synchronize()
    device.synchronize()
    return (time.perf_counter() - start) / runs
