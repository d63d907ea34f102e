"""Data parallelism: each rank computes some of a step's micro-batches, and the gradient is the sum of all.

A step is what --batch-size and --accumulate say, at any number of ranks: the micro-batches, their order, their dropout
and the weight of each token are those of a run of one rank. So is the result, but for the rounding of a sum in another
order. Every rank then updates its own copy of the parameters, by the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from wgrad.device.contract import Array, Device
from wgrad.train.data.packing import Batch
from wgrad.train.ranks.shares import Shares
from wgrad.train.ranks.world import World

_SLOTS = 2  # of each rank, behind the gradient: seconds of a micro-batch, signal that asked it to end


class DataParallel:
    """What a step needs of the other ranks. accumulate: micro-batches of a step. shares: how they are dealt.

    news: what there is to say of the last step.
    asked_here: the signal by which this rank was asked to end, or None. asked: the one by which any was, which all know
    since the last step.
    """

    def __init__(self, world: World, accumulate: int) -> None:
        self.world = world
        self.shares = Shares(accumulate, world.members)
        self.news: str | None = None
        self.asked_here: int | None = None
        self.asked: int | None = None
        self.parts: dict[str, float] | None = None  # if one is put here: seconds of each part of the steps so far
        self._begun, self._mine, self._marked = 0.0, 0, 0.0

    def share(self, batches: Sequence[Batch]) -> list[tuple[int, Batch]]:
        """This rank's micro-batches of a step, each with its number in the step. The step begins now."""
        if self.shares.members != self.world.members:
            self.shares.begin(self.world.members)
        mine = [(number, batches[number]) for number in self.shares.deal(len(batches))[self.world.rank]]
        self._begun, self._mine = time.monotonic(), len(mine)
        return mine

    def sum_gradient(self, device: Device, grad: Array, loss: Array) -> None:
        """grad (float32 [n], flat) and loss (float32 [1]): on the device, their sums over all ranks, the same on each.

        RanksLost: nothing was summed on any rank.
        """
        world, count = self.world, grad.size
        if world.alone:
            return
        self._mark("compute", device)
        reads = device.readback(grad), device.readback(loss)
        slots = np.zeros((world.size, _SLOTS), np.float32)
        values = np.concatenate([*(read.result() for read in reads), slots.reshape(-1)])
        slots = values[count + 1 :].reshape(world.size, _SLOTS)
        seconds = (time.monotonic() - self._begun) / self._mine if self._mine else 0.0
        slots[world.rank] = seconds, self.asked_here or 0
        self._mark("read_back", device)
        world.attempt(lambda: world.add(values, "the gradient of a step"))
        self._mark("all_reduce", device)
        device.write(grad, values[:count])
        device.write(loss, values[count : count + 1])
        self._mark("upload", device)
        self.asked = int(slots[:, 1].max()) or None
        self.news = self.shares.describe() if self.shares.observe(slots[:, 0].tolist()) else None

    def _mark(self, name: str, device: Device) -> None:
        """Where parts are timed: since the last mark came `name`, and of an all-reduce waiting for the others first."""
        if self.parts is None:
            return
        device.synchronize()
        now, waited = time.monotonic(), self.world.waited if name == "all_reduce" else 0.0
        begun = self._begun if name == "compute" else self._marked
        for part, seconds in ((name, now - begun - waited), ("wait", waited)):
            self.parts[part] = self.parts.get(part, 0.0) + seconds
        self._marked = now
