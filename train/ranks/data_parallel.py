"""Data parallelism: each rank computes some of a step's micro-batches, and gradients are summed over ranks.

The number of ranks does not change a step: micro-batches, their order, their dropout and the weight of each token are
those of a run with one rank. So is the result, except for rounding, because sums have another order. Every rank then
updates its own copy of the parameters with the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np

from wgrad.device.contract import Array, Device, Readback
from wgrad.train.data.packing import Batch
from wgrad.train.ranks.all_reduce import AllReduce
from wgrad.train.ranks.shares import Shares
from wgrad.train.ranks.world import World

_SLOTS = 2  # floats of each rank after the loss and scores: seconds of a micro-batch, signal that asked it to end
_ALIGN = 64  # elements; the loss begins at a multiple of it after the gradient
_WHAT = "the gradient of a step"
# Parts of the backward that are submitted to the device in advance. If all were, sums could be copied to it only after
# the last of them.
_AHEAD = 2
_LOOKING = 10.0  # seconds of asking for a bucket before waiting for it, which alone notices a device that hangs


class DataParallel:
    """The operations of a step that involve other ranks.

    Args:
        world: All ranks.
        accumulate: Micro-batches of a step.
        device: Device of this rank.
        grad: Flat gradient, float32 [n] on the device.
        buckets: (begin, end) of the part of it that is complete after each part of the last micro-batch.
        told: Floats after the gradient that are summed too, the first of them the loss.

    Attributes:
        shares: Distribution of micro-batches to ranks.
        news: Line about the last step, if there is one.
        asked_here: Signal that asked this rank to end.
        asked: Signal that asked any rank to end, which all ranks know since the last step.
        parts: If set to a dictionary, it collects the seconds of each part of the steps, which then do not overlap.
    """

    def __init__(
        self,
        world: World,
        accumulate: int,
        device: Device,
        grad: Array,
        buckets: Sequence[tuple[int, int]],
        told: int = 1,
    ) -> None:
        self.world, self._device, self._grad, self._buckets = world, device, grad, list(buckets)
        self.shares, self._told = Shares(accumulate, world.members), told
        self.news: str | None = None
        self.asked_here: int | None = None
        self.asked: int | None = None
        self.parts: dict[str, float] | None = None
        self._exchange: AllReduce | None = None
        self._members = world.members  # members of the exchange
        self._reads: list[Readback] = []
        self._given = 0
        self._asked: float | None = None  # time at which the next bucket was first asked for
        self._early: Exception | None = None
        self._begun, self._mine, self._marked = 0.0, 0, 0.0

    def share(self, batches: Sequence[Batch]) -> list[tuple[int, Batch]]:
        """Begin a step, and return this rank's micro-batches, each with its number in the step."""
        self.news = None
        if not self.world.alone:
            self._begin()
        if self.shares.members != self.world.members:
            self.shares.begin(self.world.members)
        mine = [(number, batches[number]) for number in self.shares.deal(len(batches))[self.world.rank]]
        self._begun, self._mine = time.monotonic(), len(mine)
        self._marked = self._begun
        return mine

    def _begin(self) -> None:
        """Begin the exchange of this step: the buckets, followed by the floats of `told` and all ranks' slots."""
        if self._exchange is not None and self._members != self.world.members:  # ranks were lost between steps
            self._give_up()
        if self._exchange is None:
            self._members = self.world.members
            first = -(-self._grad.size // _ALIGN) * _ALIGN
            last = first + self._told + _SLOTS * self.world.size
            self._exchange = self.world.open_all_reduce(last, [*self._buckets, (first, last)])
            self.news, self.world.remark = self.world.remark or None, ""
        self._exchange.begin()
        self._reads, self._given, self._asked, self._early = [], 0, None, None

    def part_submitted(self, number: int) -> None:
        """Read back the bucket of part `number` of the last micro-batch, which was just submitted to the device.

        Earlier buckets continue meanwhile. Waits while the device has more than _AHEAD parts to do.
        """
        if self.world.alone:
            return
        if self.parts is not None:
            self._mark(f"part {number}")
            return
        self._read(number)
        try:
            self._advance()
            while self._given + _AHEAD <= number:
                if not self._advance():
                    self.world.pause(0.0, _WHAT)
        except Exception as error:  # raised later, where all ranks can agree on it
            self._early = error

    def _read(self, number: int) -> None:
        """Start to copy a bucket to where the ranks sum it."""
        assert self._exchange is not None
        begin, end = self._buckets[number]
        grad = self._device.view(self._grad, (end - begin,), begin)
        self._reads.append(self._device.readback(grad, self._exchange.part[begin:end]))

    def sum_gradient(self, loss: Array) -> None:
        """Replace gradient and loss (float32 [told]) on the device by their sums over all ranks, the same on each.

        Raises:
            RanksLost: A rank was lost, and nothing was summed on any rank.
        """
        world, exchange = self.world, self._exchange
        if world.alone or exchange is None:
            return
        if self.parts is not None:
            self._mark("rest")
            world.total(0.0, "the other ranks")
            self._mark("wait")
        add_up = self._sum if self.parts is None else self._sum_apart
        try:
            world.attempt(lambda: add_up(exchange, loss))
        except BaseException:
            self._give_up()
            raise
        slots = self._slots(exchange.total)
        self.asked = int(slots[:, 1].max()) or None
        if self.shares.observe(slots[:, 0].tolist()):
            self.news = self.shares.describe()

    def _give_up(self) -> None:
        """Drop the exchange; the next step opens another."""
        self._exchange = None

    def _slots(self, values: np.ndarray) -> np.ndarray:
        return values[-_SLOTS * self.world.size :].reshape(self.world.size, _SLOTS)

    def _sum(self, exchange: AllReduce, loss: Array) -> None:
        """Sum each bucket as soon as it has arrived, and copy the sum to the device at once."""
        self._read_rest(exchange, loss)
        idle: float | None = None  # time since which this rank only waits for others
        while not exchange.finished:
            if self._advance(loss):
                continue
            if idle is None and self._given == len(exchange.buckets):
                idle = time.monotonic()
            self.world.pause(0.0 if idle is None else time.monotonic() - idle, _WHAT)
        self.world.came(0.0 if idle is None else time.monotonic() - idle)

    def _read_rest(self, exchange: AllReduce, loss: Array) -> None:
        if self._early is not None:
            raise self._early
        for number in range(len(self._reads), len(self._buckets)):
            self._read(number)
        first, _ = exchange.buckets[-1]
        exchange.part[first:] = 0
        self._reads.append(self._device.readback(loss, exchange.part[first : first + self._told]))

    def _advance(self, loss: Array | None = None) -> bool:
        """Do what is possible without waiting, and return whether there was anything.

        loss: array for the sum of the loss, once that has been read.
        """
        assert self._exchange is not None
        given = self._give()
        new = self._exchange.advance()
        self._upload(new, loss)
        return given or len(new) > 0

    def _give(self) -> bool:
        """Give the buckets that have arrived to the other ranks, and return whether there was one."""
        assert self._exchange is not None
        before = self._given
        while self._given < len(self._reads) and self._comes(self._reads[self._given]):
            self._reads[self._given].result()
            if self._given == len(self._buckets):
                seconds = (time.monotonic() - self._begun) / self._mine if self._mine else 0.0
                self._slots(self._exchange.part)[self.world.rank] = seconds, self.asked_here or 0
            self._exchange.give()
            self._given += 1
        return self._given > before

    def _comes(self, read: Readback) -> bool:
        """Return whether a readback has arrived, or should be waited for."""
        now = time.monotonic()
        begun, self._asked = self._asked or now, None
        if read.ready() or now - begun > _LOOKING:
            return True
        self._asked = begun
        return False

    def _upload(self, numbers: Iterable[int], loss: Array | None) -> None:
        """Copy summed buckets to the device."""
        assert self._exchange is not None
        for number in numbers:
            begin, end = self._exchange.buckets[number]
            if number < len(self._buckets):
                grad = self._device.view(self._grad, (end - begin,), begin)
                self._device.write(grad, self._exchange.total[begin:end])
            else:
                assert loss is not None
                self._device.write(loss, self._exchange.total[begin : begin + self._told])

    def _sum_apart(self, exchange: AllReduce, loss: Array) -> None:
        """Do the work of `_sum` without overlap, to time its parts."""
        self._read_rest(exchange, loss)
        while self._given < len(exchange.buckets):
            if not self._give():
                self.world.pause(0.0, _WHAT)  # the submit thread needs Python's lock
        self._mark("read_back")
        while not exchange.finished:
            if not exchange.advance():
                self.world.pause(0.0, _WHAT)
        self._mark("sum")
        self._upload(range(len(exchange.buckets)), loss)
        self._mark("upload")

    def _mark(self, name: str) -> None:
        """Add the time since the last mark to part `name`, if parts are timed."""
        if self.parts is None:
            return
        self._device.synchronize()
        now = time.monotonic()
        self.parts[name] = self.parts.get(name, 0.0) + now - self._marked
        self._marked = now
