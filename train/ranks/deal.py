"""Distribute the micro-batches of a step to ranks so that all finish together."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def even_shares(count: int, ranks: int) -> list[int]:
    """Return how many of `count` micro-batches each rank computes if all are equally fast."""
    return [len(numbers) for numbers in deal(count, [1.0] * ranks)]


def deal(count: int, seconds: Sequence[float]) -> list[range]:
    """Return the numbers of the micro-batches of each rank.

    Each micro-batch goes to the rank that would finish it first (of equals the lowest), so that the last rank finishes
    as early as possible.

    count: micro-batches. seconds: time of one micro-batch on each rank.
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
