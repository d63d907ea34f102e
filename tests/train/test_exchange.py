"""The sum of the gradient over ranks: through memory that they share and between hosts, in any order of events.

Nothing in an exchange waits, so one thread plays all ranks, and a seed says whose turn it is."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from wgrad.train.ranks import host_memory
from wgrad.train.ranks.all_reduce import AllReduce
from wgrad.train.ranks.host_memory import HostMemory, Segment, nbytes, open_segment, private_memory

SIZE = 200_003  # more than a block of the sum
BUCKETS = [(150_016, 200_000), (64, 150_016), (0, 64), (200_000, 200_003)]


def on_one_host(ranks: int, between: Any = None, buffer: Any = None) -> list[AllReduce]:
    buffer = bytearray(nbytes(ranks, SIZE, len(BUCKETS))) if buffer is None else buffer
    return [AllReduce(HostMemory(buffer, rank, ranks, SIZE, len(BUCKETS)), BUCKETS, between) for rank in range(ranks)]


def play(exchanges: list[AllReduce], rounds: list[list[np.ndarray]], chance: random.Random) -> list[list[np.ndarray]]:
    """Return the sums that each rank gets in each round. rounds: parts of all ranks. A rank may be a round ahead."""
    places = [(round_, number) for round_ in range(len(rounds)) for number in range(len(BUCKETS))]
    todo = [list(places) for _ in exchanges]
    found = [[np.full(SIZE, np.nan, np.float32) for _ in rounds] for _ in exchanges]
    at = [-1] * len(exchanges)
    while any(r < len(rounds) - 1 or not e.finished for r, e in zip(at, exchanges)):
        rank = chance.randrange(len(exchanges))
        exchange = exchanges[rank]
        if (at[rank] < 0 or exchange.finished) and at[rank] + 1 < len(rounds):
            exchange.begin()
            at[rank] += 1
        if todo[rank] and todo[rank][0][0] == at[rank] and chance.random() < 0.5:
            round_, number = todo[rank].pop(0)
            begin, end = BUCKETS[number]
            exchange.part[begin:end] = rounds[round_][rank][begin:end]
            exchange.give()
        for number in exchange.advance():
            begin, end = BUCKETS[number]
            found[rank][at[rank]][begin:end] = exchange.total[begin:end]
    return found


def parts(ranks: int, rounds: int, seed: int = 0) -> list[list[np.ndarray]]:
    generator = np.random.default_rng(seed)
    return [[generator.standard_normal(SIZE).astype(np.float32) for _ in range(ranks)] for _ in range(rounds)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_all_ranks_of_a_host_get_the_sum_in_the_order_of_ranks(ranks: int) -> None:
    """To the bit, whoever comes first, round after round in the same memory."""
    rounds = parts(ranks, 3)
    for seed in range(4):
        found = play(on_one_host(ranks), rounds, random.Random(seed))
        for number, held in enumerate(rounds):
            expected = held[0].copy()
            for part in held[1:]:
                expected += part
            for rank in range(ranks):
                np.testing.assert_array_equal(found[rank][number], expected)


def test_what_is_not_finite_arrives_and_warns_nobody() -> None:
    rounds = parts(3, 1)
    rounds[0][1][5], rounds[0][2][5], rounds[0][0][199_000] = np.inf, -np.inf, np.nan
    for held in play(on_one_host(3), rounds, random.Random(0)):
        assert np.flatnonzero(~np.isfinite(held[0])).tolist() == [5, 199_000]


# ---- between hosts -------------------------------------------------------------------------------------
class Hosts:
    """MPI between the leaders of two hosts, in one process. It matches calls in the order of each leader."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[np.ndarray, np.ndarray]]] = [[], []]

    def leader(self, rank: int) -> Any:
        return Leader(self.calls, rank)


class Leader:
    def __init__(self, calls: Any, rank: int) -> None:
        self._calls, self._rank = calls, rank

    def start(self, values: np.ndarray, begin: int) -> Any:
        self._calls[self._rank].append((values.copy(), values))
        return Pending(self._calls, self._rank, len(self._calls[self._rank]) - 1)


class Pending:
    def __init__(self, calls: Any, rank: int, number: int) -> None:
        self._calls, self._rank, self._number = calls, rank, number

    def Test(self) -> bool:
        if any(len(calls) <= self._number for calls in self._calls):
            return False
        self._calls[self._rank][self._number][1][...] = sum(calls[self._number][0] for calls in self._calls)
        return True


def test_ranks_of_two_hosts_get_the_sum_of_both() -> None:
    """Three ranks on one host, one on the other: the same bits on all."""
    hosts, rounds = Hosts(), parts(4, 3)
    alone = AllReduce(private_memory(SIZE, len(BUCKETS)), BUCKETS, hosts.leader(1))
    found = play([*on_one_host(3, hosts.leader(0)), alone], rounds, random.Random(1))
    for number, held in enumerate(rounds):
        for rank in range(4):
            np.testing.assert_array_equal(found[rank][number], (held[0] + held[1] + held[2]) + held[3])


# ---- the memory -----------------------------------------------------------------------------------------
needs_segments = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux has memory without a name")


@needs_segments
def test_another_process_opens_the_same_memory() -> None:
    """Without numpy, as far as that goes: what it writes is here."""
    segment = Segment(5000)
    code = "import sys; from wgrad.train.ranks.host_memory import open_segment; "
    code += f"buffer = open_segment({segment.address!r}); buffer[4999] = 77"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    assert segment.buffer[4999] == 77
    segment.close()


@needs_segments
def test_memory_that_is_not_the_one_meant_is_refused() -> None:
    """The number may belong to a process in another container, or to none."""
    segment = Segment(5000)
    process, file, count, token = segment.address
    for address in [(process, file, count, b"x" * 16), (process, file, 4999, token), (process, 10_000, count, token)]:
        with pytest.raises(OSError):
            open_segment(address)
    segment.close()


@needs_segments
def test_more_memory_than_is_free_is_refused_before_it_is_taken(monkeypatch: Any) -> None:
    """A system out of memory ends processes, and not the one that asked."""
    monkeypatch.setattr(host_memory, "free_memory", lambda: 4999)
    with pytest.raises(OSError, match="free"):
        Segment(5000)
    Segment(4999).close()
    monkeypatch.undo()
    assert 1 << 20 < (host_memory.free_memory() or 0) < 1 << 50
