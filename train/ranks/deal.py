"""Micro-batches of a step dealt to ranks, so that all finish together."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def even_shares(count: int, ranks: int) -> list[int]:
    """How many of `count` micro-batches each of equally fast ranks computes."""
    return [len(numbers) for numbers in deal(count, [1.0] * ranks)]


def deal(count: int, seconds: Sequence[float]) -> list[range]:
    """`count` micro-batches -> for each rank the numbers of its own, one after another.

    seconds: of one micro-batch on each rank. Each goes where it would be finished first, which makes the last one to
    finish as early as can be; of equals the lowest rank takes it.
    """
    shares = [0] * len(seconds)
    finished = [(time, rank) for rank, time in enumerate(seconds)]
    heapq.heapify(finished)
    for _ in range(count):
        time, rank = finished[0]
        shares[rank] += 1
        heapq.heapreplace(finished, (time + seconds[rank], rank))
    ends = [sum(shares[: rank + 1]) for rank in range(len(shares))]
    return [range(end - share, end) for share, end in zip(shares, ends)]
