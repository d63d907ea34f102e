"""Distribute a step's micro-batches to ranks by the speed of their devices, measured during the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from wgrad.train.ranks.deal import deal
from wgrad.train.ranks.world import Member

SKIPPED = 2  # steps after a change that are not measured, because they may compile and record
MEASURED = 5  # steps that are measured; their median counts
EVERY = 50  # steps between measurements
WORTH = 0.03  # fraction of a step's time that a new distribution must save


class Shares:
    """Distribution of micro-batches to ranks. All ranks feed it the same numbers, so they all distribute alike.

    Args:
        count: Micro-batches of a step.
        members: The ranks.

    Attributes:
        seconds: Time of a micro-batch by Member.number, as far as it was measured.
        measured: Whether shares follow the measured times; else all ranks count as equally fast.
    """

    def __init__(self, count: int, members: Sequence[Member]) -> None:
        self.count = count
        self.seconds: dict[int, float] = {}
        self.measured = True
        self.begin(members)

    def begin(self, members: Sequence[Member]) -> None:
        """Continue with these ranks; known times stay known."""
        self.members = list(members)
        self._steps, self._seen = 0, list[list[float]]()
        self._deal()

    def restore(self, seconds: Mapping[str, float]) -> None:
        """Take the measured times of a saved run, if it had as many ranks."""
        if len(seconds) == len(self.members):
            self.seconds = {int(rank): value for rank, value in seconds.items()}
            self.begin(self.members)

    def _deal(self) -> None:
        known = [self.seconds.get(member.number) for member in self.members]
        self._dealt = [1.0 if None in known else s or 1.0 for s in known]
        self.sizes = [len(numbers) for numbers in deal(self.count, self._dealt)]

    def deal(self, count: int) -> list[range]:
        """Return the numbers of each rank's micro-batches, of `count` in a step (fewer at the end of an epoch)."""
        return deal(count, self._dealt)

    def observe(self, seconds: Sequence[float]) -> bool:
        """Record a step, and return whether shares change from the next step on.

        seconds: time of a micro-batch on each rank; 0: it had none.
        """
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
        """Return a line about the shares for people."""
        shares = ", ".join(
            f"rank {member.number} {size} ({1e3 * self.seconds[member.number]:.0f} ms each)"
            for member, size in zip(self.members, self.sizes)
        )
        return f"shares: of {self.count} micro-batches a step {shares}"


def _longest(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    return max(size * time for size, time in zip(sizes, seconds))
