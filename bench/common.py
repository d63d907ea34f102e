"""What every bench shares: warm-up, timing by replay, a row's device and versions, where rows go."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
WARM_SECONDS = 0.5  # a card that idles needs this long to reach its clock
SAMPLES = 7
SAMPLE_SECONDS = 0.03


def median_spread(samples: list[float]) -> tuple[float, float]:
    """Median, and (largest - smallest) / median."""
    mid = statistics.median(samples)
    return mid, (max(samples) - min(samples)) / mid


def time_device(device: Any, work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds (median, spread) of `work` on a wgrad device: recorded a few times over, replayed many times.

    Short work is recorded often enough that the cost of a submission does not show.
    """
    work()
    device.synchronize()
    start = time.perf_counter()
    work()
    device.synchronize()
    calls = max(1, min(50, round(0.003 / (time.perf_counter() - start))))
    if time.perf_counter() - start < 0.002:
        calls = 50
    with device.capture() as replay:
        for _ in range(calls):
            work()
    start, runs = time.perf_counter(), 0
    while time.perf_counter() - start < WARM_SECONDS:
        replay.run()
        runs += 1
        if runs % 20 == 0:
            device.synchronize()
    device.synchronize()
    per_run = (time.perf_counter() - start) / runs
    inner = max(1, round(SAMPLE_SECONDS / per_run))
    samples = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        for _ in range(inner):
            replay.run()
        device.synchronize()
        samples.append((time.perf_counter() - start) / inner / calls)
    return median_spread(samples)


def time_torch(work: Callable[[], Any]) -> tuple[float, float]:
    """The same for a torch CUDA callable, with events."""
    import torch

    start, runs = time.perf_counter(), 0
    while time.perf_counter() - start < WARM_SECONDS:
        work()
        runs += 1
        if runs % 20 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    inner = max(1, round(SAMPLE_SECONDS / ((time.perf_counter() - start) / runs)))
    samples = []
    for _ in range(SAMPLES):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(inner):
            work()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) / 1e3 / inner)
    return median_spread(samples)


def has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def environment(device: Any) -> dict[str, str]:
    """Device, driver and versions, for each row."""
    row = {
        "device": device.description,
        "wgpu": version("wgpu"),
        "numpy": version("numpy"),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    if "torch" in sys.modules:
        row["torch"] = version("torch")
    return row


class Report:
    """Rows to the screen as they come, and to bench/results/NAME.jsonl (or --out FILE) at once."""

    def __init__(self, name: str, device: Any, out: str | None = None) -> None:
        self._path = Path(out) if out else RESULTS / f"{name}.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("")
        self._env = environment(device)
        print(json.dumps(self._env))

    def row(self, **values: Any) -> None:
        rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
        print("  ".join(f"{k}={v}" for k, v in rounded.items()), flush=True)
        with self._path.open("a") as file:
            file.write(json.dumps(rounded | self._env) + "\n")
