"""The exchange of gradients without cards: bench_ranks.py on devices that only take their time.

    mpirun -n 2 --bind-to none python bench/bench_exchange.py [--shapes smollm2-135m,llama-3.2-1b] [--out FILE]

A step's arithmetic is a wait of as long as it was measured on a card (PRETENDED); the gradient's bytes, their way
through the host's memory, the ranks and what they wait for are real. So it tells on any machine with a core for each
rank what of the exchange is hidden behind the backward. It tells nothing of a card's driver.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from bench_ranks import SAMPLES, SETTLE_STEPS, TIMED_STEPS, Bench, Silent, collectives
from common import Report

from wgrad.train.ranks.data_parallel import DataParallel
from wgrad.train.ranks.start import open_world
from wgrad.train.ranks.world import World
from wgrad.train.step.buckets import buckets_of

PRETENDED = {  # seconds of a step on an H200 (bench/results/ranks.jsonl), elements of the gradient, layers
    "smollm2-135m": (37.8e-3, 4_884_480, 30),
    "llama-3.2-1b": (106.6e-3, 11_272_192, 16),
    "llama-3.1-8b": (505e-3, 41_943_040, 32),
}
FORWARD = 1 / 3  # of a step
LINK = 25e9  # bytes a second between host and card
UPDATE = 2e-4  # seconds


class Waiting:
    """A device whose work takes the time that it is said to, in order, and does nothing else."""

    description = "a device that only takes its time"

    def __init__(self) -> None:
        self._free = 0.0  # when it will have done all

    def work(self, seconds: float) -> float:
        self._free = max(self._free, time.monotonic()) + seconds
        return self._free

    def zeros(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros(shape, np.float32)

    def view(self, array: np.ndarray, shape: tuple[int, ...], offset: int) -> np.ndarray:
        return array[offset : offset + shape[0]]

    def readback(self, array: np.ndarray, out: np.ndarray) -> Coming:
        return Coming(array, out, self.work(array.nbytes / LINK))

    def write(self, array: np.ndarray, host: np.ndarray) -> None:
        array[...] = host
        self.work(array.nbytes / LINK)

    def synchronize(self) -> None:
        time.sleep(max(self._free - time.monotonic(), 0))


class Coming:
    """Its readback: there at a time."""

    def __init__(self, array: np.ndarray, out: np.ndarray, due: float) -> None:
        self._array, self._out, self._due = array, out, due

    def ready(self) -> bool:
        return time.monotonic() >= self._due

    def result(self) -> np.ndarray:
        time.sleep(max(self._due - time.monotonic(), 0))
        self._out[...] = self._array
        return self._out


class Gradient:
    """The part of parameters that `buckets_of` uses: layers of equal size."""

    def __init__(self, size: int, layers: int) -> None:
        self.size, self._layers = size // (64 * layers) * 64 * layers, layers

    def places(self) -> dict[str, tuple[int, int]]:
        length = self.size // self._layers
        return {f"layers.{n}.": (n * length, (n + 1) * length) for n in range(self._layers)}


class WaitingTrainer:
    """Steps as Trainer's, of waits."""

    def __init__(self, device: Waiting, world: World, parameters: Any, seconds: float, micro: int) -> None:
        self.device, self._world = device, world
        buckets = [(bucket.begin, bucket.end) for bucket in buckets_of(parameters)]
        self._loss, grad = device.zeros((1,)), device.zeros((parameters.size,))
        self.data_parallel = DataParallel(world, micro, device, grad, buckets)  # type: ignore[arg-type]
        self.data_parallel.shares.measured = False
        self._forward = FORWARD * seconds
        self._stretches = [(seconds - self._forward) * (end - begin) / parameters.size for begin, end in buckets]

    def step(self, batches: Sequence[Any], lr: float) -> None:
        share = self.data_parallel.share(batches)
        for number, _ in share:
            self.device.work(self._forward)
            for stretch, seconds in enumerate(self._stretches):
                self.device.work(seconds)
                if number == share[-1][0]:
                    self.data_parallel.part_submitted(stretch)
        self.data_parallel.sum_gradient(self._loss)
        self.device.work(UPDATE)

    def read_history(self) -> None:
        self.device.synchronize()


class WaitingBench(Bench):
    def __init__(self, name: str, world: World, device: Waiting, args: argparse.Namespace, report: Any) -> None:
        self.name, self.world, self.device, self.args, self.report = name, world, device, args, report
        self._seconds, size, layers = PRETENDED[name]
        self.parameters = cast(Any, Gradient(size, layers))
        self.sizes = [4 * (bucket.end - bucket.begin) for bucket in buckets_of(self.parameters)]

    def trainer(self, world: World) -> Any:
        micro = max(self.world.size, self.args.micro)
        return WaitingTrainer(self.device, world, self.parameters, self._seconds, micro)

    def steps(self, micro: int, count: int = SETTLE_STEPS + SAMPLES * TIMED_STEPS) -> Any:
        return [range(micro)] * count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="smollm2-135m,llama-3.2-1b")
    parser.add_argument("--micro", type=int, default=0, help="micro-batches of a step in `strong`; 0: leave it out")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    args.compute, args.max_length = "none", 2048
    with open_world() as world, world.sharing_errors():
        device = Waiting()
        report: Any = Report("exchange", device, args.out) if world.is_main_process else Silent()
        sizes = {4, 1 << 16, 1 << 20, 1 << 22, 1 << 24}
        for name in args.shapes.split(","):
            bench = WaitingBench(name, world, device, args, report)
            bench.run()
            sizes |= set(bench.sizes)
        collectives(world, device, sorted(sizes), report)


if __name__ == "__main__":
    main()
