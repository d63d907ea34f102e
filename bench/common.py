"""Shared by all benchmarks: timing next to torch, a row's device and versions, where rows go."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from wgrad.autograd.bench import timing
from wgrad.autograd.bench.timing import SAMPLE_SECONDS, SAMPLES, median_spread

RESULTS = Path(__file__).parent / "results"
WARM_SECONDS = timing.WARM_SECONDS  # a sweep sets it lower


def time_device(device: Any, work: Callable[[], Any]) -> timing.Time:
    """`work` on a wgrad device."""
    return timing.time_device(device, work, WARM_SECONDS)


def time_torch(work: Callable[[], Any]) -> timing.Time:
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
