"""The sum of the gradient over ranks: through memory that they share, in 16 bits between hosts, in any order of events.

Nothing in an exchange waits, so one thread plays all ranks, and a seed says whose turn it is."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from wgrad.train.ranks import host_memory
from wgrad.train.ranks.all_reduce import AllReduce
from wgrad.train.ranks.host_memory import HostMemory, Segment, nbytes, open_segment, private_memory
from wgrad.train.ranks.rounded_sum import RoundedSum, round_off, widen

SIZE = 200_003  # more than a block of the sum
BUCKETS = [(150_016, 200_000), (64, 150_016), (0, 64), (200_000, 200_003)]


def on_one_host(ranks: int, between: Any = None, buffer: Any = None) -> list[AllReduce]:
    buffer = bytearray(nbytes(ranks, SIZE, len(BUCKETS))) if buffer is None else buffer
    return [AllReduce(HostMemory(buffer, rank, ranks, SIZE, len(BUCKETS)), BUCKETS, between) for rank in range(ranks)]


def play(exchanges: list[AllReduce], rounds: list[list[np.ndarray]], chance: random.Random) -> list[list[np.ndarray]]:
    """What each rank has of each round's sum. rounds: of each the parts of all ranks. A rank may be a round ahead."""
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
    """What MPI does between leaders, in one process. Calls of a kind are matched in the order of each leader, as MPI
    matches them on one communicator: `exact` and `all_to_all` share one."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.calls: dict[str, list[list[tuple[Any, ...]]]] = {
            kind: [[] for _ in range(count)] for kind in ("first", "second")
        }

    def leader(self, rank: int) -> Any:
        return Leader(self, rank)


class Leader:
    def __init__(self, hosts: Hosts, rank: int) -> None:
        self.hosts, self.rank, self.size = hosts, rank, hosts.count

    def _call(self, comm: str, kind: str, *arrays: np.ndarray) -> Any:
        calls = self.hosts.calls[comm]
        calls[self.rank].append((kind, *arrays))
        return Pending(calls, self.rank, len(calls[self.rank]) - 1)

    def exact(self, values: np.ndarray, begin: int) -> Any:
        return self._call("first", "sum", values.copy(), values)

    def all_to_all(self, send: np.ndarray, receive: np.ndarray) -> Any:
        return self._call("first", "all to all", send.copy(), receive)

    def all_gather(self, send: np.ndarray, receive: np.ndarray) -> Any:
        return self._call("second", "all gather", send.copy(), receive)


class Pending:
    def __init__(self, calls: list[list[tuple[Any, ...]]], rank: int, number: int) -> None:
        self._calls, self._rank, self._number = calls, rank, number

    def Test(self) -> bool:
        if any(len(calls) <= self._number for calls in self._calls):
            return False
        matched = [calls[self._number] for calls in self._calls]
        (kind,) = {call[0] for call in matched}
        sent, receive = [call[1] for call in matched], matched[self._rank][2]
        if kind == "sum":
            receive[...] = sum(sent[1:], sent[0])
        elif kind == "all to all":
            receive[...] = [array[self._rank] for array in sent]
        else:
            receive[...] = sent
        return True


ROUNDED = BUCKETS[-1][0]  # the last bucket travels as it is


def two_hosts(errors: list[np.ndarray]) -> list[AllReduce]:
    """Three ranks on one host, one on the other."""
    hosts = Hosts(2)
    leaders = [hosts.leader(rank) for rank in range(2)]
    between = [RoundedSum(leader, error, leader.exact) for leader, error in zip(leaders, errors)]
    alone = AllReduce(private_memory(SIZE, len(BUCKETS)), BUCKETS, between[1])
    return [*on_one_host(3, between[0]), alone]


def test_between_hosts_nothing_is_lost_in_16_bits_but_comes_later() -> None:
    """All ranks get the same bits; sums of all rounds and what is still owed are the sums of all parts; what does not
    begin within `error` is not rounded."""
    rounds, errors = parts(4, 6), [np.zeros(ROUNDED, np.float32) for _ in range(2)]
    found = play(two_hosts(errors), rounds, random.Random(1))
    for number in range(len(rounds)):
        for rank in range(1, 4):
            np.testing.assert_array_equal(found[rank][number], found[0][number])
        exact = np.asarray(rounds[number], np.float64).sum(axis=0)
        np.testing.assert_allclose(found[0][number][ROUNDED:], exact[ROUNDED:], rtol=1e-5, atol=1e-6)
        bits = found[0][number][:ROUNDED].view(np.uint32)
        assert not (bits & 0xFFFF).any()
        off = np.abs(found[0][number][:ROUNDED] - exact[:ROUNDED])
        assert 1e-3 < off.max() < 0.2  # rounded, and by no more than a few units of 8 bits of about 4
    wanted = np.asarray(rounds, np.float64).sum(axis=(0, 1))[:ROUNDED]
    got = np.asarray([held[:ROUNDED] for held in found[0]], np.float64).sum(axis=0)
    np.testing.assert_allclose(got + errors[0] + errors[1], wanted, atol=2e-5)
    assert np.abs(got - wanted).max() > 1e-3


def test_a_part_that_is_not_finite_leaves_no_error() -> None:
    """It arrives, so that the step is skipped on all, and the next sum is as if it had not been."""
    rounds, errors = parts(4, 2), [np.zeros(ROUNDED, np.float32) for _ in range(2)]
    rounds[0][1][70], rounds[0][3][100_000] = np.inf, np.nan
    found = play(two_hosts(errors), rounds, random.Random(2))
    for held in found:
        assert not np.isfinite(held[0][70]) and np.isnan(held[0][100_000])
        assert np.isfinite(held[1]).all()
    assert all(np.isfinite(error).all() for error in errors)


def test_bits_are_those_of_bfloat16() -> None:
    """Ties to even, the largest number, infinities, and NaN with all bits set, as cards make it."""
    values = np.random.default_rng(0).standard_normal(3 * (1 << 16)).astype(np.float32)
    ties = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0x7F7FFFFF, 0x7F800000, 0xFF800000], np.uint32)
    nans = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32)
    values[:6], values[1 << 16 : (1 << 16) + 3] = ties.view(np.float32), nans.view(np.float32)
    out, back = np.zeros(values.size, np.uint16), np.zeros_like(values)
    round_off(values, out, np.zeros_like(values))
    widen(out, back)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(back, values.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert np.isnan(back[1 << 16 : (1 << 16) + 3]).all()


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
    """Of a process in another container with that number, or of none."""
    segment = Segment(5000)
    process, file, count, token = segment.address
    for address in [(process, file, count, b"x" * 16), (process, file, 4999, token), (process, 10_000, count, token)]:
        with pytest.raises(OSError):
            open_segment(address)
    segment.close()


@needs_segments
def test_more_memory_than_is_free_is_refused_before_it_is_taken(monkeypatch: Any) -> None:
    """A system out of memory ends processes, and not the one that asked."""
    monkeypatch.setattr(host_memory, "_free_bytes", lambda: 4999)
    with pytest.raises(OSError, match="free"):
        Segment(5000)
    Segment(4999).close()
    monkeypatch.undo()
    assert 1 << 20 < host_memory._free_bytes() < 1 << 50
