"""Where the arrays of work that repeats lie: sizes and lifetimes are known from a first run, so few blocks hold them.

A pool that knows nothing of what comes gives an array a free block of about its size and makes a new one where there is
none, so blocks of one part of the work lie idle in the others. Here the largest array is placed first, and each next
one in a block that is free for as long as it lives, or a new one. No value hangs on where it lies.
Source: Pisarchyk and Lee, Efficient Memory Management for Deep Neural Net Inference (arXiv 2001.03288).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass
class _Life:
    """Lifetime of an array: bytes of the block that it asks for, and when it had it, by a count of the pool's calls."""

    nbytes: int
    begin: int
    end: float = math.inf


class Rehearsal:
    """Allocations of a rehearsal: work that runs once before it is recorded."""

    def __init__(self) -> None:
        self.lives: list[_Life] = []
        self._alive: dict[Hashable, _Life] = {}
        self._calls = 0

    def taken(self, block: Hashable, nbytes: int) -> None:
        self._calls += 1
        life = self._alive[block] = _Life(nbytes, self._calls)
        self.lives.append(life)

    def returned(self, block: Hashable) -> None:
        self._calls += 1
        if (life := self._alive.pop(block, None)) is not None:  # what was taken before is of no interest
            life.end = self._calls


@dataclass(frozen=True)
class Placement:
    """sizes: bytes of each block. wanted, block_of: what each array asks for in its turn, and the block that it has."""

    sizes: list[int]
    wanted: list[int]
    block_of: list[int]


def place(rehearsal: Rehearsal) -> Placement:
    lives = rehearsal.lives
    sizes: list[int] = []
    taken: list[list[tuple[int, float]]] = []  # of each block, in order: when it is in use
    block_of = [0] * len(lives)
    for number in sorted(range(len(lives)), key=lambda n: (-lives[n].nbytes, lives[n].begin)):
        life = lives[number]
        span = (life.begin, life.end)
        # All are large enough: sizes only fall.
        block = next((n for n in range(len(sizes)) if _is_free(taken[n], span)), len(sizes))
        if block == len(sizes):
            sizes.append(life.nbytes)
            taken.append([])
        insort(taken[block], span)
        block_of[number] = block
    return Placement(sizes, [life.nbytes for life in lives], block_of)


def _is_free(taken: list[tuple[int, float]], span: tuple[int, float]) -> bool:
    at = bisect_left(taken, span)
    return (at == 0 or taken[at - 1][1] <= span[0]) and (at == len(taken) or span[1] <= taken[at][0])
