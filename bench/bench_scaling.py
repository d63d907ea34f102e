"""How time and memory of a QLoRA step grow: with the batch (1 to 16), the length of a row (512 to 32,768), the model.

    python bench/bench_scaling.py [--device NAME] [--compute float16] [--dry] [--seconds 480] [--out FILE]

Arithmetic (FLOP, by wgrad.autograd.bench.cost over every call of a step) and memory come from a dry run of the very
step; time and memory in use are then measured. `tflops` is the slope of time against arithmetic: where it stays, time
grows as the arithmetic. `to_plan` is memory measured over memory planned. A point whose time (by the rate so far) does
not fit into what is left of --seconds is not timed, nor is any with --dry, or on a software driver.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bench_train import GIB, SHAPES, build, random_step
from common import Report
from count_launches import counting_device

from wgrad.autograd.bench.cost import cost
from wgrad.autograd.bench.timing import median_spread
from wgrad.autograd.bind import bind
from wgrad.wgsl.device import WgpuDevice

MODELS = ("smollm2-135m", "smollm2-360m", "llama-3.2-1b", "llama-3.1-8b")
BATCHES = (1, 2, 4, 8, 16)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
SETTLE_STEPS, SAMPLES = 3, 5

Point = tuple[str, int, int]  # model, batch, tokens in a row


def points(model: str, models: tuple[str, ...], shortest: int) -> Iterator[tuple[str, Point]]:
    """Sweeps: the variable and its values. shortest: tokens of the sweeps that change something else."""
    yield from (("batch", (model, batch, shortest)) for batch in BATCHES)
    yield from (("length", (model, 1, length)) for length in LENGTHS)
    yield from (("model", (name, 1, shortest)) for name in models)


def step_of(point: Point, device: Any, compute: str) -> Any:
    """A function that runs step n of a trainer on the device. Layers are recomputed, so that sizes compare."""
    name, batch, length = point
    shape = replace(SHAPES[name], checkpointing=True)
    trainer, _ = build(shape, length, device, compute, batch=batch)

    def step(index: int) -> None:
        trainer.step(random_step(index, length, shape.vocab, batch), 1e-4)
        trainer.read_history()

    return step


def planned(point: Point, device: Any, compute: str) -> tuple[float, int]:
    """FLOP of a step, and the most bytes in use, on a device where nothing runs."""
    implementations, total = device.bound_operators, 0.0

    def counted(name: str) -> Any:
        def call(device: Any, **given: Any) -> Any:
            nonlocal total
            made = implementations[name](device, **given)
            total += cost(name, given, made).flop
            return made

        return call

    device.bound_operators = {name: counted(name) for name in implementations}
    step = step_of(point, device, compute)
    for index in range(2):  # the second is as all that follow
        total = 0.0
        step(index)
    return total, device.memory().peak_bytes


def measured(point: Point, device: Any, compute: str) -> dict[str, Any]:
    step = step_of(point, device, compute)
    for index in range(SETTLE_STEPS):
        step(index)
    samples = []
    for index in range(SAMPLES):
        start = time.perf_counter()
        step(SETTLE_STEPS + index)
        samples.append(time.perf_counter() - start)
    seconds, spread = median_spread(samples)
    tokens = point[1] * point[2]
    return {"ms_per_step": 1e3 * seconds, "spread": spread, "tokens_per_second": tokens / seconds,
            "peak_gib": device.memory().peak_bytes / GIB}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=None, help="adapter index or name (default: the best)")
    parser.add_argument("--compute", default="float32")
    parser.add_argument("--model", default="llama-3.2-1b", help="whose batch and length change")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--max-length", type=int, default=2048, help="where the batch or the model changes")
    parser.add_argument("--dry", action="store_true", help="plan only, for a large card: no GPU is needed")
    parser.add_argument("--seconds", type=float, default=480.0, help="of timing, in all")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    device = bind(WgpuDevice)(args.device)
    dry = args.dry or device.software
    report, end, rate = Report("scaling", device, args.out), time.monotonic() + args.seconds, 5e12
    for what, point in points(args.model, tuple(args.models.split(",")), args.max_length):
        card = counting_device(args.compute == "float16") if dry else device.dry_run()
        flop, peak = planned(point, card, args.compute)
        row = {"what": what, "model": point[0], "batch": point[1], "seq_len": point[2], "compute": args.compute,
               "tflop": flop / 1e12, "planned_gib": peak / GIB}  # fmt: skip
        if not dry and (SETTLE_STEPS + SAMPLES) * flop / rate < end - time.monotonic():
            # A device of its own for each, so that one's memory does not count for the next.
            row |= measured(point, bind(WgpuDevice)(args.device), args.compute)
            rate = flop / row["ms_per_step"] * 1e3
            row |= {"tflops": rate / 1e12, "to_plan": row["peak_gib"] / row["planned_gib"]}
        report.row(**row)


if __name__ == "__main__":
    main()
