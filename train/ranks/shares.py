"""How many of a step's micro-batches each rank computes: by what one takes on its device, measured as the run goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from wgrad.train.ranks.deal import deal
from wgrad.train.ranks.world import Member

SKIPPED = 2  # steps that are not measured after a deal: they may compile and record
MEASURED = 5  # steps whose median counts
EVERY = 50  # steps from one measurement to the next
WORTH = 0.03  # a share of a step's time that a new deal must save


class Shares:
    """The deal of `count` micro-batches to ranks. seconds: of one micro-batch by Member.number, 1.0 where none was
    measured; `Shares` of all ranks are fed the same numbers, and so always deal alike."""

    def __init__(self, count: int, members: Sequence[Member]) -> None:
        self.count = count
        self.seconds: dict[int, float] = {}
        self.measured = True  # False: all ranks are dealt alike, whatever they take
        self.begin(members)

    def begin(self, members: Sequence[Member]) -> None:
        """These ranks go on; what is known of them stays known."""
        self.members = list(members)
        self._steps, self._seen = 0, list[list[float]]()
        self._deal()

    def restore(self, seconds: Mapping[str, float]) -> None:
        """Deal as a run did that was saved with these `seconds`, if it had as many ranks."""
        if len(seconds) == len(self.members):
            self.seconds = {int(rank): value for rank, value in seconds.items()}
            self.begin(self.members)

    def _deal(self) -> None:
        known = [self.seconds.get(member.number) for member in self.members]
        self._dealt = [1.0 if None in known else s or 1.0 for s in known]
        self.sizes = [len(numbers) for numbers in deal(self.count, self._dealt)]

    def deal(self, count: int) -> list[range]:
        """Numbers of a step's `count` micro-batches (fewer at the end of an epoch) for each rank."""
        return deal(count, self._dealt)

    def observe(self, seconds: Sequence[float]) -> bool:
        """A step is done, in which one micro-batch took so long on each rank (0: it had none). -> whether the shares
        are others from the next step on."""
        if not self.measured:
            return False
        self._steps += 1
        if self._steps % EVERY in range(SKIPPED + 1, SKIPPED + MEASURED + 1):
            self._seen.append(list(seconds))
        if self._steps % EVERY != SKIPPED + MEASURED:
            return False
        for member, seen in zip(self.members, zip(*self._seen)):
            if any(seen):
                self.seconds[member.number] = median(s for s in seen if s)
        self._seen = []
        before, now = self.sizes, [self.seconds.get(member.number, 0.0) for member in self.members]
        if not all(now):
            return False
        sizes = [len(numbers) for numbers in deal(self.count, now)]
        if _longest(sizes, now) > (1 - WORTH) * _longest(before, now):
            return False
        self._deal()
        return True

    def describe(self) -> str:
        """For people."""
        shares = ", ".join(
            f"rank {member.number} {size} ({1e3 * self.seconds[member.number]:.0f} ms each)"
            for member, size in zip(self.members, self.sizes)
        )
        return f"shares: of {self.count} micro-batches a step {shares}"


def _longest(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    return max(size * time for size, time in zip(sizes, seconds))
