"""Sum an array over all ranks, bucket by bucket: first over the ranks of a host, through shared memory, then between
hosts, through MPI.

Each rank of a host sums a slice of every bucket, in the order of ranks, so that all get the same bits, whichever is
first. One rank of each host, its leader, then sums between hosts. Nothing here waits: `advance` does what is possible,
and is called again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from wgrad.train.ranks.host_memory import HostMemory

_BLOCK = 1 << 16  # elements that are summed at a time, so that a sum of more than two stays in the cache
_ALIGN = 16  # elements, so that no two ranks write to the same cache line


class Request(Protocol):
    def Test(self) -> bool:
        """Return whether the request is done."""


class Between(Protocol):
    """Sum over hosts. Each host's leader calls it with the same buckets, in the same order."""

    def start(self, values: np.ndarray, begin: int) -> Request:
        """Start to sum float32 elements over hosts, in place. begin: their first index in the array."""


class AllReduce:
    """A sum over ranks that is repeated in rounds.

    Args:
        memory: Memory that the ranks of this host share.
        buckets: (begin, end) of each bucket.
        between: Sum over hosts; None: all ranks share memory.

    Attributes:
        part: float32, this rank's values, to be filled bucket by bucket (`give`) after `begin`.
        total: float32, the sum of the buckets that `advance` has returned, until the next round gives them.
    """

    def __init__(self, memory: HostMemory, buckets: Sequence[tuple[int, int]], between: Between | None = None) -> None:
        self._memory, self.buckets, self._between = memory, list(buckets), between
        self.part, self.total = memory.parts[memory.rank], memory.total
        self._leads = between is not None and memory.rank == 0
        self._round = self._given = self._summed = self._led = self._done = 0
        self._requests: deque[Request] = deque()

    def begin(self) -> None:
        """Begin the next round."""
        self._round += 1
        self._given = self._summed = self._led = self._done = 0

    def give(self) -> None:
        """Mark the next bucket of `part` as filled."""
        memory = self._memory
        memory.fence()
        memory.given[memory.rank, self._given] = self._round
        self._given += 1

    @property
    def finished(self) -> bool:
        return self._done == len(self.buckets)

    def advance(self) -> range:
        """Do what is possible without waiting, and return the numbers of the buckets that are newly summed."""
        memory, before = self._memory, self._done
        while self._summed < self._given and self._all(memory.given, self._summed):
            self._add(self._summed)
            memory.fence()
            memory.summed[memory.rank, self._summed] = self._round
            self._summed += 1
        if self._leads:
            self._lead()
        while self._done < self._summed and self._is_done(self._done):
            self._done += 1
        return range(before, self._done)

    def _all(self, flags: np.ndarray, bucket: int) -> bool:
        """Return whether all ranks of the host have reached a bucket in this round."""
        if int(flags[:, bucket].min()) < self._round:
            return False
        self._memory.fence()
        return True

    def _is_done(self, bucket: int) -> bool:
        if self._between is None:
            return self._all(self._memory.summed, bucket)
        if int(self._memory.done[bucket]) < self._round:
            return False
        self._memory.fence()
        return True

    def _add(self, bucket: int) -> None:
        """Sum this rank's slice of a bucket over the host."""
        memory, (begin, end) = self._memory, self.buckets[bucket]
        if memory.ranks == 1:
            return
        first, last = (_cut(begin, end, part, memory.ranks) for part in (memory.rank, memory.rank + 1))
        with np.errstate(invalid="ignore", over="ignore"):  # a step whose gradient is not finite is skipped
            for at in range(first, last, _BLOCK):
                block = slice(at, min(at + _BLOCK, last))
                total = memory.total[block]
                np.add(memory.parts[0, block], memory.parts[1, block], out=total)
                for part in memory.parts[2:, block]:
                    np.add(total, part, out=total)

    def _lead(self) -> None:
        memory = self._memory
        assert self._between is not None
        started = self._led + len(self._requests)
        while started < self._summed and self._all(memory.summed, started):
            begin, end = self.buckets[started]
            self._requests.append(self._between.start(memory.total[begin:end], begin))
            started += 1
        while self._requests and self._requests[0].Test():
            self._requests.popleft()
            memory.fence()
            memory.done[self._led] = self._round
            self._led += 1


def _cut(begin: int, end: int, part: int, parts: int) -> int:
    """Return where slice `part` of `parts` begins."""
    return end if part == parts else begin + (end - begin) * part // parts // _ALIGN * _ALIGN
