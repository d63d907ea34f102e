"""Losses of the device at random moments of runs: `python -m tests.train.loss_campaign [NUMPY] [VULKAN]`.

So many losses of NumPy behind a front (lossy_device.py), 900 by default, and so many of lavapipe behind a Vulkan driver
that says it is lost, or resets at a submission of more than 2 s (tests/portability/front_driver.c), 100 by default.
Every run has to end with the bits of one that nothing happened to, and none may lose a step behind the newest state in
main memory. A few minutes.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.portability.dawn import LAVAPIPE, front_driver
from tests.train.test_recovery import Runs, contents
from wgrad.train.run import kept_state, recovery, whole_run
from wgrad.train.run.recovery import MOST

SEED = 0
WATCHDOG = 2.0  # seconds


class Campaign:
    """Counts of runs, device losses, repeated steps, and seconds of reopening."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.runs = self.losses = self.steps = self.given_up = 0
        self.reopening: list[float] = []
        after, reopened = whole_run.WholeRun.after, recovery.Losses.reopened

        def counted(run: Any, *given: Any) -> Any:
            self.losses += 1
            state, done = run.kept.state if run.kept is not None else None, run.session.stream.step
            newest = state or run.state
            goes_on = after(run, *given)
            assert (goes_on.state.step if goes_on.state else 0) == (newest.step if newest else 0)
            self.steps += done - (newest.step if newest else 0)
            return goes_on

        def timed(*given: Any) -> Any:
            begun = time.monotonic()
            device = reopened(*given)
            self.reopening.append(time.monotonic() - begun)
            return device

        patch.setattr(whole_run.WholeRun, "after", counted)
        patch.setattr(recovery.Losses, "reopened", timed)
        patch.setattr(kept_state, "_SECONDS", 0.0)

    def run(self, runs: Runs, patch: pytest.MonkeyPatch, expected: Any, **options: Any) -> Any:
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status, out, front = runs.run(patch, **options)
            while status == 2 and f"{MOST} times at step" in said.getvalue().splitlines()[-1]:
                self.given_up += 1
                status, *_ = runs.run(patch, (), "--resume", device=options.get("device", ""))
        self.runs += 1
        assert status == 0, said.getvalue()
        assert expected is None or contents(out) == expected, said.getvalue()
        return front if expected is not None else (front, contents(out))

    def __str__(self) -> str:
        slowest = max(self.reopening, default=0.0)
        return (
            f"{self.losses} losses in {self.runs} runs, {self.losses - self.given_up} recovered, {self.given_up} the "
            f"third at a step and resumed; {self.steps} steps done anew, none behind the newest state; the same bits "
            f"in all runs; reopened in {slowest:.2f} s at most"
        )


def numpy_part(losses: int, folder: Path) -> None:
    chosen, begun = random.Random(SEED), time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        runs, campaign = Runs(folder), Campaign(patch)
        front, expected = campaign.run(runs, patch, None)
        mean, by_call = front.calls / 4, Counter[str]()
        while campaign.losses < losses:
            gaps = [int(chosen.expovariate(1 / mean)) + 1 for _ in range(20)]
            by_call += campaign.run(runs, patch, expected, gaps=gaps).losses
    print(
        f"NumPy: {campaign}; {time.monotonic() - begun:.0f} s; {len(by_call)} kinds of calls: {dict(by_call)}",
        flush=True,
    )


def vulkan_part(losses: int, folder: Path) -> None:
    """Run in a new process, which starts with the front driver."""
    environment = {**os.environ, **front_driver("cc", folder, "FAULTS", os.environ.get("LAVAPIPE", LAVAPIPE))}
    environment |= {"VK_DRIVER_FILES": environment["VK_ICD_FILENAMES"], "RUST_BACKTRACE": "0"}
    command = [sys.executable, "-m", "tests.train.loss_campaign", str(losses), str(folder), "vulkan"]
    with open(folder / "panics.txt", "w", encoding="utf-8") as panics:
        subprocess.run(command, env=environment, check=True, stderr=panics)


def vulkan_child(losses: int, folder: Path) -> None:
    library = ctypes.CDLL(str(folder / "front_driver.so"))
    at, calls, lost = (ctypes.c_int.in_dll(library, f"wgrad_fault_{name}") for name in ("at", "calls", "losses"))
    chosen, begun = random.Random(SEED), time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        runs, campaign = Runs(folder), Campaign(patch)
        _, expected = campaign.run(runs, patch, None, device="wgpu")
        ctypes.c_double.in_dll(library, "wgrad_fault_seconds").value = WATCHDOG
        mean = calls.value / 3
        reopened = recovery.Losses.reopened

        def again(*given: Any) -> Any:
            device = reopened(*given)
            at.value = calls.value + int(chosen.expovariate(1 / mean)) + 1
            return device

        patch.setattr(recovery.Losses, "reopened", again)
        while campaign.losses < losses:
            at.value = calls.value + int(chosen.expovariate(1 / mean)) + 1
            campaign.run(runs, patch, expected, device="wgpu")
    print(f"Vulkan: {campaign} ({lost.value} by the driver's count); {time.monotonic() - begun:.0f} s", flush=True)


def main() -> int:
    if sys.argv[-1] == "vulkan":
        vulkan_child(int(sys.argv[1]), Path(sys.argv[2]))
        return 0
    counts = [int(text) for text in sys.argv[1:]] + [900, 100][len(sys.argv) - 1 :]
    if counts[0]:
        numpy_part(counts[0], Path(tempfile.mkdtemp()))
    if counts[1]:
        vulkan_part(counts[1], Path(tempfile.mkdtemp()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
