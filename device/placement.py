"""Placing the arrays of repeated work in few blocks, with sizes and lifetimes known from a first run.

A pool without this knowledge gives an array a free block of about its size, or a new one, so that blocks of one part of
the work are idle in the others. Here the largest array is placed first, and each next one in a block that is free for
its lifetime, or a new one. Values do not depend on the placement.
Source: Pisarchyk and Lee, Efficient Memory Management for Deep Neural Net Inference (arXiv 2001.03288).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass
class _Life:
    """Lifetime of an array: bytes of its block, and first and last use, counted in calls of the pool."""

    nbytes: int
    begin: int
    end: float = math.inf


class Rehearsal:
    """Allocations of a rehearsal: work that runs once before it is recorded."""

    def __init__(self) -> None:
        self.lives: list[_Life] = []
        self.spared = False  # whether memory was short, so that cached values were freed
        self._alive: dict[Hashable, _Life] = {}
        self._calls = 0
        self._others = False  # whether it returned blocks that were taken before

    def taken(self, block: Hashable, nbytes: int) -> None:
        self._calls += 1
        life = self._alive[block] = _Life(nbytes, self._calls)
        self.lives.append(life)

    def returned(self, block: Hashable) -> None:
        self._calls += 1
        if (life := self._alive.pop(block, None)) is None:  # blocks taken before do not matter for a placement
            self._others = True
        else:
            life.end = self._calls

    def calls(self) -> list[int] | None:
        """Return the calls of the pool in order: N where array N is taken, ~N where it is returned.

        None: the work may take other arrays the next time, since it has left arrays behind, returned earlier ones, or
        found memory short.
        """
        if self._alive or self._others or self.spared:
            return None
        at = [(life.begin, n) for n, life in enumerate(self.lives)]
        at += [(int(life.end), ~n) for n, life in enumerate(self.lives)]
        return [call for _, call in sorted(at)]


@dataclass(frozen=True)
class Placement:
    """A placement.

    sizes: bytes of each block. For each array in order, wanted: its bytes; block_of: its block; left: whether the
    rehearsal left it behind.
    """

    sizes: list[int]
    wanted: list[int]
    block_of: list[int]
    left: list[bool]


def place(rehearsal: Rehearsal) -> Placement:
    lives = rehearsal.lives
    sizes: list[int] = []
    taken: list[list[tuple[int, float]]] = []  # the times at which each block is in use, in order
    block_of = [0] * len(lives)
    for number in sorted(range(len(lives)), key=lambda n: (-lives[n].nbytes, lives[n].begin)):
        life = lives[number]
        span = (life.begin, life.end)
        # All blocks are large enough, since sizes only fall.
        block = next((n for n in range(len(sizes)) if _is_free(taken[n], span)), len(sizes))
        if block == len(sizes):
            sizes.append(life.nbytes)
            taken.append([])
        insort(taken[block], span)
        block_of[number] = block
    left = [life.end == math.inf for life in lives]
    return Placement(sizes, [life.nbytes for life in lives], block_of, left)


def _is_free(taken: list[tuple[int, float]], span: tuple[int, float]) -> bool:
    at = bisect_left(taken, span)
    return (at == 0 or taken[at - 1][1] <= span[0]) and (at == len(taken) or span[1] <= taken[at][0])
