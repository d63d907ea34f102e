"""Data parallelism: each rank computes some of a step's micro-batches, and the gradient is the sum of all.

A step is what --batch-size and --accumulate say, at any number of ranks: the micro-batches, their order, their dropout
and the weight of each token are those of a run of one rank. So is the result, but for the rounding of a sum in another
order. Every rank then updates its own copy of the parameters, by the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from wgrad.device.contract import Array, Device, Readback
from wgrad.train.data.packing import Batch
from wgrad.train.ranks.shares import Shares
from wgrad.train.ranks.world import World

_SLOTS = 2  # of each rank, behind the gradient: seconds of a micro-batch, signal that asked it to end


class DataParallel:
    """What a step needs of the other ranks.

    accumulate: micro-batches of a step. grad: the flat gradient, float32 [n] on the device. buckets: (begin, end) of
    the stretches of it that are complete after each part of the last micro-batch. shares: how micro-batches are dealt.
    news: what there is to say of the last step. asked_here: the signal by which this rank was asked to end, or None;
    asked: the one by which any was, which all know since the last step. parts: if a dictionary is put here, seconds of
    each part of the steps so far, which then do not overlap.
    """

    def __init__(
        self, world: World, accumulate: int, device: Device, grad: Array, buckets: Sequence[tuple[int, int]]
    ) -> None:
        self.world, self._device, self._grad, self._buckets = world, device, grad, list(buckets)
        self.shares = Shares(accumulate, world.members)
        self.news: str | None = None
        self.asked_here: int | None = None
        self.asked: int | None = None
        self.parts: dict[str, float] | None = None
        self._values = self._tail = np.zeros(0, np.float32)
        self._slots = np.zeros((0, _SLOTS), np.float32)
        self._old: list[tuple[np.ndarray, np.ndarray]] = []
        self._reads: dict[int, Readback] = {}
        self._begun, self._mine, self._marked = 0.0, 0, 0.0

    def share(self, batches: Sequence[Batch]) -> list[tuple[int, Batch]]:
        """This rank's micro-batches of a step, each with its number in the step. The step begins now."""
        if self.shares.members != self.world.members:
            self.shares.begin(self.world.members)
        mine = [(number, batches[number]) for number in self.shares.deal(len(batches))[self.world.rank]]
        self._begun, self._mine = time.monotonic(), len(mine)
        self._reads = {}
        return mine

    def part_submitted(self, number: int) -> None:
        """The device has been given part `number` of the last micro-batch: its bucket comes back once that is done."""
        if not self.world.alone and self.parts is None:
            self._read(number)

    def _read(self, number: int) -> None:
        begin, end = self._buckets[number]
        self._reads[number] = self._device.readback(self._device.view(self._grad, (end - begin,), begin))

    def sum_gradient(self, loss: Array) -> None:
        """The gradient and loss (float32 [1]): on the device, their sums over all ranks, the same on each.

        RanksLost: nothing was summed on any rank.
        """
        world = self.world
        if world.alone:
            return
        self._mark("compute")
        if self.parts is not None:
            world.total(0.0, "the other ranks")
            self._mark("wait")
        if self._slots.shape[0] != world.size:
            # An all-reduce that was given up may still write to the arrays of before: they stay as long as this.
            self._old.append((self._values, self._tail))
            self._values = np.zeros(self._grad.size, np.float32)
            self._tail = np.zeros(1 + _SLOTS * world.size, np.float32)
            self._slots = self._tail[1:].reshape(world.size, _SLOTS)
        world.attempt(lambda: self._sum(loss))
        self._mark("exchange")
        self.asked = int(self._slots[:, 1].max()) or None
        self.news = self.shares.describe() if self.shares.observe(self._slots[:, 0].tolist()) else None

    def _sum(self, loss: Array) -> None:
        """Each bucket is added up as soon as it has come back, and goes to the device as soon as that is done."""
        device = self._device
        for number in self.world.add_parts(self._ready(loss), "the gradient of a step"):
            if number < len(self._buckets):
                begin, end = self._buckets[number]
                device.write(device.view(self._grad, (end - begin,), begin), self._values[begin:end])
        device.write(loss, self._tail[:1])

    def _ready(self, loss: Array) -> Iterator[np.ndarray | None]:
        """The buckets, then loss and slots; None while the device has more to do before the next one."""
        for number in range(len(self._buckets)):
            if number not in self._reads:
                self._read(number)
        last = self._device.readback(loss)
        for number, (begin, end) in enumerate(self._buckets):
            while not self._reads[number].ready():
                yield None
            part = self._values[begin:end]
            part[:] = self._reads[number].result()
            yield part
        self._tail[:] = 0
        self._tail[:1] = last.result()
        seconds = (time.monotonic() - self._begun) / self._mine if self._mine else 0.0
        self._slots[self.world.rank] = seconds, self.asked_here or 0
        yield self._tail

    def _mark(self, name: str) -> None:
        """Where parts are timed: since the last mark came `name`."""
        if self.parts is None:
            return
        self._device.synchronize()
        now, begun = time.monotonic(), self._begun if name == "compute" else self._marked
        self.parts[name] = self.parts.get(name, 0.0) + now - begun
        self._marked = now
