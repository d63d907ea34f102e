"""Ranks that are threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from wgrad.train.ranks.all_reduce import AllReduce
from wgrad.train.ranks.host_memory import HostMemory, nbytes
from wgrad.train.ranks.world import Member, RanksLost, World
from wgrad.train.step.trainer import Trainer

LIMIT = 300  # seconds for one rank to wait for another


class ThreadWorld(World):
    """The ranks are threads, which share memory, and add what they hold at a barrier. failing: how many attempts fail,
    on all."""

    alone = False

    def __init__(self, rank: int, held: list[Any], barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.size, self._held, self._barrier = rank, len(held), held, barrier
        self.members = [Member(number, "host") for number in range(self.size)]
        self.failing = 0

    def attempt(self, work: Callable[[], Any]) -> Any:
        result = work()
        if self.failing:
            self.failing -= 1
            raise RanksLost()
        return result

    def open_all_reduce(self, size: int, buckets: Any) -> AllReduce:
        if self.rank == 0:
            self._held[0] = bytearray(nbytes(self.size, size, len(buckets)))
        self._barrier.wait(LIMIT)
        memory = HostMemory(self._held[0], self.rank, self.size, size, len(buckets))
        self._barrier.wait(LIMIT)
        return AllReduce(memory, buckets)

    def pause(self, waited: float, what: str) -> None:
        assert waited < LIMIT and not self._barrier.broken
        time.sleep(1e-4)

    def all_reduce(self, values: np.ndarray, what: str, *, patient: bool = False) -> None:
        self._held[self.rank] = values.copy()
        self._barrier.wait(LIMIT)
        values[:] = sum(self._held[1:], self._held[0])
        self._barrier.wait(LIMIT)


def together(trainers: list[Trainer], work: Callable[[Trainer], None]) -> None:
    """Run `work` on all ranks at once. The first error of any is raised here."""
    errors: list[BaseException] = []

    def run(trainer: Trainer) -> None:
        try:
            work(trainer)
        except BaseException as error:
            errors.append(error)
            trainer.world._barrier.abort()  # type: ignore[attr-defined]

    threads = [threading.Thread(target=run, args=(trainer,)) for trainer in trainers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def parameters(trainer: Trainer) -> np.ndarray:
    return trainer.device.download(trainer.optimizer.parameters.data)
