"""One card beside several: weak and strong scaling of QLoRA steps over ranks, and the time of each part of a step.

    mpirun -n 2 --bind-to none python bench/bench_ranks.py [--shapes smollm2-135m,llama-3.2-1b,llama-3.1-8b]
        [--compute float16] [--seq-len 2048] [--seconds 500] [--out FILE]

Random weights, settings as in bench_train.py; each rank takes the next card of its host. Of each shape:

    one       the first rank alone, the others waiting: a micro-batch a step
    beside    every rank by itself at once: what the cards take from each other without a word between them
    weak      a micro-batch a rank, every step synchronised; efficiency = tokens/s over ranks x tokens/s of `one`
    strong    a step of as many micro-batches as --micro (8) on one card, and shared by all
    parts     of a weak step, the device waited for after each, so that nothing overlaps: compute, waiting for the
              others, exchange (read-back, all-reduce and upload, bucket after bucket), update

And of MPI alone: seconds of an all-reduce of 4 bytes to the largest gradient, and of each of these bytes read back from
and uploaded to the card. bench/scaling_model.py reads the file (bench/results/ranks.jsonl).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from bench_train import SHAPES, build, random_step
from common import Report

from wgrad.autograd.bench.timing import median_spread
from wgrad.autograd.bind import bind
from wgrad.autograd.select_device import list_devices
from wgrad.train.data.packing import Step
from wgrad.train.ranks.devices import device_of_rank
from wgrad.train.ranks.start import open_world
from wgrad.train.ranks.world import World
from wgrad.train.run.trainer import Trainer
from wgrad.wgsl.device import WgpuDevice

SETTLE_STEPS, TIMED_STEPS, SAMPLES = 4, 4, 5


class _Silent:
    """The report of the ranks that do not speak."""

    def row(self, **values: Any) -> None:
        pass


def steps_of(count: int, first: int, seq_len: int, vocab: int, micro: int) -> list[Step]:
    """Steps of `micro` micro-batches of one row, made ahead: to draw them is not training."""
    rows = [
        [random_step((first + i) * micro + m, seq_len, vocab).batches[0] for m in range(micro)] for i in range(count)
    ]
    return [Step(first + i, 0, batches) for i, batches in enumerate(rows)]


def timed(trainer: Trainer, world: World, steps: Sequence[Step]) -> tuple[float, float]:
    """Median seconds of a step over SAMPLES stretches that all ranks begin together, and their spread."""
    size, samples = TIMED_STEPS, []
    for step in steps[:SETTLE_STEPS]:
        trainer.step(step, 1e-4)
    trainer.read_history()
    for sample in range(SAMPLES):
        world.exchange(None, "a sample")
        begun = time.perf_counter()
        for step in steps[SETTLE_STEPS + sample * size : SETTLE_STEPS + (sample + 1) * size]:
            trainer.step(step, 1e-4)
        trainer.device.synchronize()
        samples.append((time.perf_counter() - begun) / size)
        trainer.read_history()
    return median_spread(samples)


def parts_of(trainer: Trainer, world: World, steps: Sequence[Step]) -> dict[str, float]:
    """Mean milliseconds of each part of a step, the device waited for after each. Other than in a step as it is, parts
    do not overlap, so they add up to more."""
    parts: dict[str, float] = {}
    trainer.data_parallel.parts, update = parts, 0.0
    for number, step in enumerate(steps):
        if number == 2:
            parts.clear()
            update = 0.0
        world.exchange(None, "a step")
        trainer.step(step, 1e-4)
        begun = time.perf_counter()
        trainer.device.synchronize()
        update += time.perf_counter() - begun
        trainer.read_history()
    trainer.data_parallel.parts = None
    count = len(steps) - 2
    return {f"{name}_ms": 1e3 * seconds / count for name, seconds in (parts | {"update": update}).items()}


def _upload(device: Any, array: Any, host: np.ndarray) -> None:
    device.write(array, host)
    device.synchronize()


def collectives(world: World, device: Any, largest: int, report: Any) -> None:
    """Seconds of all-reduces, and of the way from and to the card, by bytes."""
    nbytes = 4
    while True:
        nbytes = min(nbytes, largest)
        host, array = np.zeros(nbytes // 4, np.float32), device.zeros((nbytes // 4,))
        works: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(world.add, host, "a measurement"),
            "read_back": partial(device.download, array),
            "upload": partial(_upload, device, array, host),
        }
        row = {}
        for name, work in works.items():
            samples = []
            for _ in range(12):
                world.exchange(None, "a measurement")
                begun = time.perf_counter()
                work()
                samples.append(time.perf_counter() - begun)
            row[f"{name}_ms"] = 1e3 * median_spread(samples[2:])[0]
        report.row(what="bytes", ranks=world.size, bytes=nbytes, **row)
        if nbytes == largest:
            return
        nbytes *= 16


def bench_shape(name: str, world: World, device: Any, args: argparse.Namespace, report: Any) -> int:
    """-> bytes of the flat gradient."""
    shape, seq_len, ranks = SHAPES[name], args.seq_len, world.size
    trainer, parameters = build(shape, seq_len, device, args.compute)
    options = replace(trainer.config, accumulate=max(ranks, args.micro))
    alone = Trainer(trainer.model, trainer.optimizer, options)
    shared = Trainer(trainer.model, trainer.optimizer, options, world)
    shared.data_parallel.shares.measured = False
    del trainer
    count = SETTLE_STEPS + SAMPLES * TIMED_STEPS
    first = 0

    def steps(micro: int, count: int = count) -> list[Step]:
        nonlocal first
        first += count
        return steps_of(count, first, seq_len, shape.vocab, micro)

    def row(what: str, micro: int, seconds: float, spread: float, **more: Any) -> None:
        rate = micro * seq_len / seconds
        report.row(what=what, work=name, compute=args.compute, ranks=ranks, micro=micro, seq_len=seq_len,
                   ms_per_step=1e3 * seconds, spread=spread, tokens_per_second=rate, **more)  # fmt: skip

    seconds = world.by_first(lambda: timed(alone, World(), steps(1)), "the first rank alone")
    row("one", 1, *seconds)
    beside = timed(alone, world, steps(1))
    slowest = max(world.exchange(beside, "beside"))
    row("beside", 1, *slowest, to_one=seconds[0] / slowest[0])
    weak = timed(shared, world, steps(ranks))
    row("weak", ranks, *weak, speedup=ranks * seconds[0] / weak[0], efficiency=seconds[0] / weak[0],
        gradient_mb=parameters.size * 4 / 1e6)  # fmt: skip
    parts = world.exchange(parts_of(shared, world, steps(ranks, 8)), "the parts of a step")
    for rank, values in enumerate(parts):
        report.row(what="parts", work=name, rank=rank, **values)
    if args.micro:
        large = world.by_first(lambda: timed(alone, World(), steps(args.micro)), "a large step alone")
        together = timed(shared, world, steps(args.micro))
        row("strong", args.micro, *together, one_ms=1e3 * large[0], speedup=large[0] / together[0])
    return parameters.size * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="smollm2-135m,llama-3.2-1b,llama-3.1-8b")
    parser.add_argument("--compute", default="float32")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--micro", type=int, default=8, help="micro-batches of a step in `strong`; 0: leave it out")
    parser.add_argument("--seconds", type=float, default=500.0, help="no further shape is begun after so long")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    begun = time.monotonic()
    with open_world() as world, world.sharing_errors():
        spec = device_of_rank("wgpu", world.local_rank, world.local_size, list_devices)
        device = bind(WgpuDevice)(spec.partition(":")[2] or None)
        report: Any = Report("ranks", device, args.out) if world.speaks else _Silent()
        for member, name in zip(world.members, world.exchange(f"{spec}: {device.description}", "the devices")):
            report.row(what="rank", rank=member.number, host=member.host, card=name)
        largest = 4
        for name in args.shapes.split(","):
            if world.by_first(lambda: time.monotonic() - begun, "the time") > args.seconds:
                report.row(what="left out", work=name, seconds=args.seconds)
                continue
            largest = max(largest, bench_shape(name, world, device, args, report))
            device.synchronize()
        collectives(world, device, largest, report)


if __name__ == "__main__":
    main()
