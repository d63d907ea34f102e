"""`wgrad bench --against-cpu`: a QLoRA step on the device, in NumPy and in torch on this machine's CPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from wgrad.autograd.bench.timing import median_spread
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.select_device import select_device
from wgrad.device.contract import Device
from wgrad.device.cores import usable_cores
from wgrad.device.errors import WgradError
from wgrad.train.commands.bench_model import SHAPES, Shape, build, random_step
from wgrad.train.options.bench_config import BenchConfig
from wgrad.train.step.compute import compute_type
from wgrad.train.step.trainer import HISTORY_STEPS

RANK, TOKENS, LEARNING_RATE = 8, 512, 1e-4
_SHAPES = {"tiny": ("tiny",), "small": ("smollm2-135m",)}  # by --size
_ALL = ("smollm2-135m", "tinyllama-1.1b")
_SAMPLES, _MOST_SECONDS = 5, 5.0
_FIRST_STEPS = 2  # of a GPU, which compile and record
_SETTLE_SECONDS = 1.0  # a GPU that idles, as while its kernels are compiled, has a sixth of its clock
_SAMPLE_SECONDS = 0.5
_GPU, _NUMPY, _TORCH = "device", "NumPy", "torch"


@dataclass(frozen=True)
class Row:
    """A timed step. stack: `device`, `NumPy` or `torch`. trainable: number of trained parameters."""

    shape: str
    stack: str
    compute: str
    seconds: float
    trainable: int


def run_against_cpu(config: BenchConfig) -> int:
    """Time the steps, print a line for each, and the ratio to post.

    Raises:
        WgradError: The device is the CPU itself, or another option of bench contradicts.
    """
    for name in ("op", "compare", "explain", "out"):
        if getattr(config, name):
            raise WgradError(f"--against-cpu times whole steps: leave out --{name}")
    device = select_device(config.device)
    if device.name == "cpu":
        raise WgradError("--against-cpu: no GPU to compare with the CPU: wgrad doctor says why")
    tell = partial(print, flush=True)
    tell(f"device: {device.description} ({device.reason})")
    tell(f"CPU: {cpu_name()}")
    tell(f"a QLoRA step: r = {RANK} on seven projections, batch 1, {TOKENS} tokens, random weights")
    if importlib.util.find_spec("torch") is None:
        tell("torch is not installed: NumPy alone stands for the CPU")
    rows = [row for name in _SHAPES.get(config.size, _ALL) for row in _measure(name, device, tell)]
    tell(to_post(rows, device.description))
    return 0


def _measure(name: str, device: Device, tell: Callable[[str], None]) -> list[Row]:
    rows = []
    for stack, time_it in (
        (_GPU, partial(_time_wgrad, device=device)),
        (_NUMPY, partial(_time_wgrad, device=ReferenceDevice())),
        (_TORCH, _time_torch),
    ):
        row = time_it(name, stack)
        if row is not None:
            rows.append(row)
            rate = f"{TOKENS / row.seconds:,.4g} tokens/s"
            tell(f"{name:<16} {stack:<8} {row.compute:<9} {1e3 * row.seconds:>10,.1f} ms  {rate}")
    return rows


def _time_wgrad(name: str, stack: str, device: Device) -> Row:
    shape = SHAPES[name]
    compute = compute_type("auto", device)
    trainer, parameters = build(shape, TOKENS, device, compute, mode={"lora_r": RANK})
    steps = iter(range(1 << 30))

    def step() -> None:
        trainer.step(random_step(next(steps), TOKENS, shape.vocab), LEARNING_RATE)

    first, settle = (0, 0.0) if device.name == "cpu" else (_FIRST_STEPS, _SETTLE_SECONDS)
    seconds = seconds_of(step, wait=trainer.read_history, first=first, settle=settle)
    return Row(name, stack, compute, seconds, parameters.count)


def _time_torch(name: str, stack: str) -> Row | None:
    """Time the step in torch, in a process of its own, because torch's threads would stay. None: not installed."""
    if importlib.util.find_spec("torch") is None:
        return None
    script = Path(__file__).with_name("torch_step.py")
    command = [sys.executable, "-P", str(script), json.dumps(torch_sizes(SHAPES[name]))]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        print(f"note: torch is left out: {reason}", file=sys.stderr)
        return None
    found = json.loads(done.stdout.splitlines()[-1])
    return Row(name, stack, found["compute"], median_spread(found["samples"]).seconds, found["trainable"])


def torch_sizes(shape: Shape) -> dict[str, Any]:
    """Return the argument of torch_step.py."""
    timing = {"settle": 1, "samples": _SAMPLES, "most_seconds": _MOST_SECONDS}
    return {**dataclasses.asdict(shape), **timing, "rank": RANK, "tokens": TOKENS}


def seconds_of(step: Callable[[], object], wait: Callable[[], object], *, first: int = 0, settle: float = 0.0) -> float:
    """Return the median seconds of a step, after `first` steps, and one or more that take `settle` seconds.

    Short steps are timed many in a row, as in a run, where the host prepares the next while the device works. Slow
    steps are timed fewer times.

    Args:
        step: Gives a step to the device.
        wait: Waits for the device, and reads the history of at most `HISTORY_STEPS` steps.
    """

    def timed(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            step()
        wait()
        return (time.perf_counter() - start) / count

    for _ in range(first):
        timed(1)
    begun = time.perf_counter()
    last = timed(1)
    while time.perf_counter() - begun < settle:
        last = timed(1)
    count = min(max(1, int(_SAMPLE_SECONDS / last)), HISTORY_STEPS)
    samples, begun = list[float](), time.perf_counter()
    while len(samples) < _SAMPLES and not (samples and time.perf_counter() - begun > _MOST_SECONDS):
        samples.append(timed(count))
    return median_spread(samples).seconds


def times_cpu(rows: list[Row]) -> float:
    """Return the device's speed relative to the CPU's fastest stack: the geometric mean over the shapes."""
    logs = []
    for name in dict.fromkeys(row.shape for row in rows):
        of_shape = {row.stack: row.seconds for row in rows if row.shape == name}
        gpu = of_shape.pop(_GPU)
        logs.append(math.log(min(of_shape.values()) / gpu))
    return math.exp(sum(logs) / len(logs))


def to_post(rows: list[Row], device: str) -> str:
    """Return the line to post."""
    shapes = " and ".join(dict.fromkeys(row.shape for row in rows))
    stacks = "NumPy or torch, the faster" if any(row.stack == _TORCH for row in rows) else "NumPy"
    return f"to post: {device} is {times_cpu(rows):.3g} times as fast as {cpu_name()} ({stacks}) at QLoRA of {shapes}"


def cpu_name() -> str:
    """Return the processor's name and how many of its cores this process may use."""
    cores = usable_cores()
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {cores} cores"
