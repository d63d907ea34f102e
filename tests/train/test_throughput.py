"""Tokens a second and time left, on a device whose every step is finished at a known time."""

from __future__ import annotations

import io
import math
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from wgrad.autograd.ops.optimizer import STATE_SIZE
from wgrad.train.data.packing import BatchStream, Document
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.output.metrics import MetricsFile, read_metrics
from wgrad.train.run.loop import Run
from wgrad.train.run.throughput import Throughput
from wgrad.train.step.trainer import HISTORY_STEPS
from wgrad.train.terminal.progress import Display, TrainingProgress

TOKENS = 20  # of each step


class Clock:
    now = 500.0

    def __call__(self) -> float:
        return self.now


class Device:
    """Steps are submitted in `host` seconds and finished `step` seconds after the one before; `depth` may be under way.

    The host hears of finished steps only in groups of `together`, as where read-backs arrive on somebody else's poll.
    """

    config: RunOptions

    def __init__(self, clock: Clock, step: float, host: float, depth: int, together: int, first: float = 0.0) -> None:
        self.clock, self.seconds, self.host, self.depth, self.together = clock, step, host, depth, together
        self.first = first  # more, for the first step
        self.ends: list[float] = []
        self._recorded = 0
        self.optimizer = SimpleNamespace(finite=lambda: True)
        self.world = SimpleNamespace(alone=True)
        self.data_parallel = SimpleNamespace(news="")
        self.history_steps = 0
        self.metrics = lambda row: dict[str, float]()

    def step(self, step: Any, lr: float) -> None:
        self.clock.now += self.host
        begin = max(self.clock.now, self.ends[-1] if self.ends else 0.0)
        self.ends.append(begin + self.seconds + (0.0 if self.ends else self.first))
        if len(self.ends) > self.depth:
            self.clock.now = max(self.clock.now, self.ends[-1 - self.depth])
        self._recorded += 1

    def history_readback(self) -> Any:
        count, self._recorded = self._recorded, 0
        upto = len(self.ends)
        heard = min(-(-upto // self.together) * self.together, 10**9)

        def ready() -> bool:
            return len(self.ends) >= heard and self.ends[heard - 1] <= self.clock.now

        def result() -> np.ndarray:
            self.clock.now = max(self.clock.now, self.ends[upto - 1])
            return np.ones((count, 1 + STATE_SIZE), np.float32)

        return SimpleNamespace(ready=ready, result=result)


class Shown(TrainingProgress):
    """Keeps what it is told."""

    def update(self, steps_done: int, **values: float) -> None:
        super().update(steps_done, **values)
        self.told = [*getattr(self, "told", []), (steps_done, values, self.display.clock())]


def go(device: Device, out: Path, steps: int, log_every: int, save: Any = None, save_every: int = 0) -> Shown:
    documents = [Document(np.arange(TOKENS, dtype=np.int32), np.ones(TOKENS, bool)) for _ in range(8)]
    device.config = RunOptions(
        max_length=TOKENS,
        batch_size=1,
        gradient_accumulation_steps=1,
        max_steps=steps,
        logging_steps=log_every,
        save_steps=save_every,
    )
    device.history_steps = min(log_every, HISTORY_STEPS)
    display = Display(Console(file=io.StringIO()), device.clock)
    display._tick_until = lambda stop: None  # type: ignore[method-assign]
    interrupts: Any = SimpleNamespace(asked=None, writing=nullcontext)
    stream = BatchStream(documents, device.config)
    progress = Shown(steps, log_every=log_every, display=display)
    with MetricsFile(out) as metrics, progress:
        run = Run(device, stream, metrics, progress, save or (lambda done: None), interrupts)  # type: ignore[arg-type]
        run.train()
        run.say()
    return progress


@pytest.mark.parametrize("log_every", [1, 3, 10])
@pytest.mark.parametrize("together", [1, 4, 8])
@pytest.mark.parametrize(("seconds", "host"), [(0.02, 0.001), (0.6, 0.01), (9.0, 0.1), (0.05, 0.05)])
def test_tokens_per_second_are_the_devices(
    tmp_path: Path, log_every: int, together: int, seconds: float, host: float
) -> None:
    """However often the host asks and whenever it hears: never far from what the device does, at no step."""
    device = Device(Clock(), seconds, host, depth=8, together=together)
    progress = go(device, tmp_path, 200, log_every)
    true = TOKENS / max(seconds, host)
    rates = [r["tokens_per_second"] for r in read_metrics(tmp_path / "metrics.jsonl")]
    assert len(rates) == 200
    # At the begin the host may hear of a step only when seven more are done.
    assert all(0.2 * true < rate < 1.5 * true for rate in rates), (min(rates), max(rates), true)
    settled = rates[40:-10]
    assert all(0.85 * true < rate < 1.15 * true for rate in settled), (min(settled), max(settled), true)
    assert [values["tokens_per_second"] for _, values, _ in progress.told][-1] == pytest.approx(rates[-1], rel=1e-2)


@pytest.mark.parametrize("log_every", [1, 1000])
def test_the_first_step_is_told_when_it_is_finished_and_then_again_and_again(tmp_path: Path, log_every: int) -> None:
    device = Device(Clock(), 0.6, 0.01, depth=2, together=1)
    progress = go(device, tmp_path, 100, log_every)
    steps = [step for step, _, _ in progress.told]
    assert steps[0] == 1 and steps[-1] == 100 and len(steps) >= 95
    step, values, at = progress.told[0]
    assert at == pytest.approx(device.ends[0]) and values["loss"] == 1.0
    for step, _, at in progress.told:
        assert device.ends[step - 1] <= at + 1e-9


def test_a_fast_device_is_asked_a_few_times_a_second(tmp_path: Path) -> None:
    device = Device(Clock(), 0.002, 0.0001, depth=8, together=1)
    progress = go(device, tmp_path, 2000, 1000)
    assert 10 <= len(progress.told) <= 60  # in 4 s: not 2,000


def test_time_left_leaves_out_compiling_and_checkpoints(tmp_path: Path) -> None:
    """The first step takes 60 s more, each checkpoint 30 s: neither is a step's time."""
    clock = Clock()
    device = Device(clock, 0.5, 0.01, depth=2, together=1, first=60.0)

    def save(done: int) -> None:
        clock.now += 30.0

    progress = go(device, tmp_path, 100, 1, save, save_every=10)
    for step, values, _ in progress.told[1:]:
        # A checkpoint empties the device's queue: after each the device waits for the host once.
        assert values["left"] == pytest.approx(0.5 * (100 - step), rel=0.1, abs=0.1)
    rates = [r["tokens_per_second"] for r in read_metrics(tmp_path / "metrics.jsonl")]
    assert all(rate == pytest.approx(TOKENS / 0.5, rel=0.1) for rate in rates[12:])


def test_before_the_first_step_nothing_is_known() -> None:
    throughput = Throughput(Clock())
    assert throughput.tokens_per_second == 0.0 and throughput.seconds_per_step == math.inf


def test_what_is_seen_at_one_moment_is_one_look() -> None:
    clock = Clock()
    throughput = Throughput(clock)
    clock.now += 2.0
    for _ in range(5):
        throughput.finished(1, 100)
    assert throughput.tokens_per_second == pytest.approx(250.0)
    assert throughput.seconds_per_step == pytest.approx(0.4)


def test_the_rate_follows_a_device_that_slows_down() -> None:
    clock = Clock()
    throughput, steps = Throughput(clock), deque([0.1] * 50 + [1.0] * 20)
    rates = []
    for seconds in steps:
        clock.now += seconds
        throughput.finished(1, 100)
        rates.append(throughput.tokens_per_second)
    assert rates[49] == pytest.approx(1000.0) and rates[-1] == pytest.approx(100.0)
