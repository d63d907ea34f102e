"""One GPU and several: weak and strong scaling of QLoRA steps over ranks, and the time of each part of a step.

    mpirun -n 2 --bind-to none python bench/bench_ranks.py [--shapes smollm2-135m,llama-3.2-1b,llama-3.1-8b]
        [--compute float16] [--max-length 2048] [--keep-activations] [--seconds 500] [--out FILE]

Random weights, settings as in bench_train.py; each rank takes the next GPU of its host. Of each shape:

    one       the first rank alone, the others waiting: a micro-batch per step
    through   the same, with the gradient going to the host and back in buckets, without a sum
    beside    all ranks at once without communication: how much the GPUs slow each other down
    weak      a micro-batch per rank, every step synchronized; efficiency = tokens/s over ranks x tokens/s of `one`
    strong    a step of as many micro-batches as --micro (8) on one GPU, and shared by all
    parts     of a weak step, waiting for the device after each, so that nothing overlaps: the device up to each bucket,
              waiting for the other ranks, read-back, sum between ranks, upload, update; copies and sums also in GB/s

And for the buckets' and other sizes: milliseconds of an all-reduce by MPI, of the sum between the ranks (`all_gather`,
through shared memory where they have it), and of the copies from and to the GPU.
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
from wgrad.train.ranks.all_reduce import AllReduce
from wgrad.train.ranks.devices import device_of_rank
from wgrad.train.ranks.start import open_world
from wgrad.train.ranks.world import World
from wgrad.train.step.buckets import buckets_of
from wgrad.train.step.trainer import Trainer
from wgrad.wgsl.device import WgpuDevice

SETTLE_STEPS, TIMED_STEPS, SAMPLES = 4, 4, 5
MOVING = ("read_back", "sum", "upload")  # parts of a step that have bytes


class Silent:
    """The report of ranks that print nothing."""

    def row(self, **values: Any) -> None:
        pass


class Through(World):
    """A single rank whose gradient goes to the host and back as with several ranks."""

    alone = False

    def pause(self, waited: float, what: str) -> None:
        time.sleep(2e-5)


def steps_of(count: int, first: int, seq_len: int, vocab: int, micro: int) -> list[Step]:
    """Draw the batches ahead, `micro` micro-batches of one row per step, so that drawing is not timed."""
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
        world.all_gather(None, "a sample")
        begun = time.perf_counter()
        for step in steps[SETTLE_STEPS + sample * size : SETTLE_STEPS + (sample + 1) * size]:
            trainer.step(step, 1e-4)
        trainer.device.synchronize()
        samples.append((time.perf_counter() - begun) / size)
        trainer.read_history()
    return median_spread(samples)


def parts_of(trainer: Trainer, world: World, steps: Sequence[Step]) -> dict[str, float]:
    """Return mean seconds of each part of a step, waiting for the device after each.

    Unlike in a real step parts do not overlap, so they add up to more.
    """
    parts: dict[str, float] = {}
    trainer.data_parallel.parts, update = parts, 0.0
    for number, step in enumerate(steps):
        if number == 2:
            parts.clear()
            update = 0.0
        world.all_gather(None, "a step")
        trainer.step(step, 1e-4)
        begun = time.perf_counter()
        trainer.device.synchronize()
        update += time.perf_counter() - begun
        trainer.read_history()
    trainer.data_parallel.parts = None
    return {name: seconds / (len(steps) - 2) for name, seconds in (parts | {"update": update}).items()}


def parts_row(parts: dict[str, float], nbytes: float) -> dict[str, Any]:
    """Return milliseconds (a list for the parts of the backward) and GB/s."""
    stretches = [parts[name] for name in parts if name.startswith("part ")]
    row: dict[str, Any] = {"backward_ms": [1e3 * seconds for seconds in stretches]}
    row["compute_ms"] = 1e3 * (sum(stretches) + parts["rest"])
    row |= {f"{name}_ms": 1e3 * parts[name] for name in ("wait", *MOVING, "update")}
    return row | {f"{name}_gb_per_second": nbytes / 1e9 / parts[name] for name in MOVING}


def _upload(device: Any, array: Any, host: np.ndarray) -> None:
    device.write(array, host)
    device.synchronize()


def _sum(world: World, exchange: AllReduce) -> None:
    def work() -> None:
        exchange.begin()
        exchange.give()
        while not exchange.finished:
            if not exchange.advance():
                world.pause(0.0, "a measurement")

    world.attempt(work)


def collectives(world: World, device: Any, sizes: Sequence[int], report: Any) -> None:
    """Time sums between ranks, and copies from and to the GPU, by size."""
    for nbytes in sizes:
        count = nbytes // 4
        host, array = np.zeros(count, np.float32), device.zeros((count,))
        exchange = world.open_all_reduce(count, [(0, count)])
        works: dict[str, Callable[[], Any]] = {
            "all_reduce": partial(world.all_reduce, host, "a measurement"),
            "exchange": partial(_sum, world, exchange),
            "read_back": lambda: device.readback(array, exchange.part).result(),  # noqa: B023
            "upload": partial(_upload, device, array, exchange.total),
        }
        row = {}
        for name, work in works.items():
            samples = []
            for _ in range(12):
                world.all_gather(None, "a measurement")
                begun = time.perf_counter()
                work()
                samples.append(time.perf_counter() - begun)
            row[f"{name}_ms"] = 1e3 * median_spread(samples[2:])[0]
        rates = {f"{name[:-3]}_gb_per_second": nbytes / 1e6 / milliseconds for name, milliseconds in row.items()}
        report.row(what="bytes", ranks=world.size, bytes=nbytes, **row, **rates)


class Bench:
    """The measurements of one shape. sizes: bytes of its gradient's buckets."""

    checkpointing = False

    def __init__(self, name: str, world: World, device: Any, args: argparse.Namespace, report: Any) -> None:
        self.name, self.world, self.device, self.args, self.report = name, world, device, args, report
        self.shape, self.first = SHAPES[name], 0
        if args.keep_activations:
            self.shape = replace(self.shape, checkpointing=False)
        self.checkpointing = self.shape.checkpointing
        trainer, self.parameters = build(self.shape, args.max_length, device, args.compute)
        self.model, self.optimizer = trainer.model, trainer.optimizer
        self.options = replace(trainer.config, gradient_accumulation_steps=max(world.size, args.micro))
        self.sizes = [4 * (bucket.end - bucket.begin) for bucket in buckets_of(self.parameters)]

    def trainer(self, world: World) -> Trainer:
        trainer = Trainer(self.model, self.optimizer, self.options, world)
        trainer.data_parallel.shares.measured = False
        return trainer

    def steps(self, micro: int, count: int = SETTLE_STEPS + SAMPLES * TIMED_STEPS) -> list[Step]:
        self.first += count
        return steps_of(count, self.first, self.args.max_length, self.shape.vocab, micro)

    def row(self, what: str, micro: int, seconds: float, spread: float, **more: Any) -> None:
        args = self.args
        rate = micro * args.max_length / seconds
        self.report.row(what=what, work=self.name, compute=args.compute, ranks=self.world.size, micro=micro,
                        seq_len=args.max_length, checkpointing=self.checkpointing, ms_per_step=1e3 * seconds,
                        spread=spread, tokens_per_second=rate, **more)  # fmt: skip

    def run(self) -> None:
        world, ranks, micro = self.world, self.world.size, self.args.micro
        alone, nbytes = self.trainer(World()), 4 * self.parameters.size
        one = world.broadcast(lambda: timed(alone, World(), self.steps(1)), "the first rank alone")
        self.row("one", 1, *one)
        beside = max(world.all_gather(timed(alone, world, self.steps(1)), "beside"))
        self.row("beside", 1, *beside, to_one=one[0] / beside[0])
        through, parts = world.broadcast(self._through, "the first rank's way to the host and back")
        self.row("through", 1, *through, bucket_bytes=self.sizes, **parts)
        shared = self.trainer(world)
        weak = timed(shared, world, self.steps(ranks))
        self.row("weak", ranks, *weak, speedup=ranks * one[0] / weak[0], efficiency=one[0] / weak[0],
                 exposed_ms=1e3 * (weak[0] - one[0]), gradient_mb=nbytes / 1e6)  # fmt: skip
        apart = parts_row(parts_of(shared, world, self.steps(ranks, 8)), nbytes)
        for rank, values in enumerate(world.all_gather(apart, "the parts of a step")):
            self.report.row(what="parts", work=self.name, rank=rank, **values)
        if micro:
            large = world.broadcast(lambda: timed(alone, World(), self.steps(micro)), "a large step alone")
            together = timed(shared, world, self.steps(micro))
            self.row("strong", micro, *together, one_ms=1e3 * large[0], speedup=large[0] / together[0])

    def _through(self) -> tuple[tuple[float, float], dict[str, Any]]:
        trainer = self.trainer(Through())
        seconds = timed(trainer, World(), self.steps(1))
        return seconds, parts_row(parts_of(trainer, World(), self.steps(1, 8)), 4 * self.parameters.size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="smollm2-135m,llama-3.2-1b,llama-3.1-8b")
    parser.add_argument("--compute", default="float32")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--micro", type=int, default=8, help="micro-batches of a step in `strong`; 0: leave it out")
    parser.add_argument("--keep-activations", action="store_true", help="recompute no layer, as on an empty GPU")
    parser.add_argument("--seconds", type=float, default=500.0, help="no further shape is begun after so long")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    begun = time.monotonic()
    with open_world() as world, world.sharing_errors():
        spec = device_of_rank("wgpu", world.local_rank, world.local_size, list_devices)
        device = bind(WgpuDevice)(spec.partition(":")[2] or None)
        report: Any = Report("ranks", device, args.out) if world.is_main_process else Silent()
        for member, name in zip(world.members, world.all_gather(f"{spec}: {device.description}", "the devices")):
            report.row(what="rank", rank=member.number, host=member.host, card=name)
        sizes = {4, 1 << 16, 1 << 20, 1 << 22, 1 << 24}
        for name in args.shapes.split(","):
            if world.broadcast(lambda: time.monotonic() - begun, "the time") > args.seconds:
                report.row(what="left out", work=name, seconds=args.seconds)
                continue
            bench = Bench(name, world, device, args, report)
            bench.run()
            sizes |= set(bench.sizes)
            del bench
            device.synchronize()
        collectives(world, device, sorted(sizes), report)
        if world.remark:
            report.row(what="remark", text=world.remark)


if __name__ == "__main__":
    main()
