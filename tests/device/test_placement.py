"""Recordings whose memory is placed as it was rehearsed: no two arrays at one place at one time, and little of it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
import pytest

from tests.conftest import wgpu_sibling
from tests.device.test_memory import Driver, _is_consistent
from wgrad.autograd.replay import Recorded
from wgrad.device.dry_run import DryRuntime
from wgrad.device.errors import OutOfMemory
from wgrad.device.memory import Pool
from wgrad.device.placement import Rehearsal, place

KIB = 1024
Work = Sequence[tuple[str, int]]  # (name, KiB) takes memory, (name, 0) gives it back

# 16 KiB, then twice 8: one block of 16 and one of 8 do.
PHASES: Work = [("a", 16), ("a", 0), ("b", 8), ("c", 8), ("b", 0), ("d", 4), ("c", 0), ("d", 0)]


class Made(Pool):
    """A pool over a driver that counts."""

    def __init__(self) -> None:
        self.driver = Driver()
        super().__init__(self.driver.create, self.driver.destroy)


def run(pool: Pool, work: Work, keep: str = "") -> dict[str, Any]:
    """Return what is left at the end. No two live arrays may share a block."""
    alive: dict[str, Any] = {}
    for name, kib in work:
        if kib:
            alive[name] = pool.allocate(kib * KIB)
            assert alive[name].block.nbytes >= kib * KIB
        elif name != keep:
            del alive[name]
        blocks = [lease.block for lease in alive.values()]
        assert len(set(blocks)) == len(blocks)
    return alive


def rehearse(pool: Pool, work: Work) -> Rehearsal:
    """Rehearse the work on a pool, which is empty again afterwards."""
    pool.rehearsal = rehearsal = Rehearsal()
    run(pool, work)
    pool.rehearsal = None
    pool.trim()
    return rehearsal


def record(pool: Made, work: Work, rehearsal: Rehearsal | None, keep: str = "") -> dict[str, Any]:
    pool.begin_capture(rehearsal)
    left = run(pool, work, keep)
    pool.end_capture()
    _is_consistent(pool, pool.driver)
    return left


def random_work(seed: int) -> Work:
    rng, alive = np.random.default_rng(seed), list[str]()
    work: list[tuple[str, int]] = []
    for number in range(60):
        work.append((str(number), int(rng.choice([1, 2, 4, 7, 8, 16, 30, 64]))))
        alive.append(str(number))
        while alive and rng.random() < 0.55:
            work.append((alive.pop(int(rng.integers(len(alive)))), 0))
    return work


def least(rehearsal: Rehearsal) -> int:
    """Bytes without which no blocks hold the work, each given whole to one array at a time: for each rank the largest
    array that any moment has at it."""
    most: list[int] = []
    for moment in (life.begin for life in rehearsal.lives):
        there = sorted((x.nbytes for x in rehearsal.lives if x.begin <= moment < x.end), reverse=True)
        most += [0] * (len(there) - len(most))
        most = [max(pair) for pair in zip(most, there + [0] * len(most))]
    return sum(most)


@pytest.mark.parametrize("seed", range(20))
def test_no_two_arrays_are_at_one_place_at_one_time(seed: int) -> None:
    """In hardly more memory than the least; and the recording has it so."""
    pool, work = Made(), random_work(seed)
    rehearsal = rehearse(pool, work)
    placement = place(rehearsal)
    assert [life.nbytes for life in rehearsal.lives] == placement.wanted == [kib * KIB for _, kib in work if kib]
    for n, one in enumerate(rehearsal.lives):
        assert placement.sizes[placement.block_of[n]] >= one.nbytes
        for m, other in enumerate(rehearsal.lives[:n]):
            if placement.block_of[n] == placement.block_of[m]:
                assert one.end <= other.begin or other.end <= one.begin
    assert least(rehearsal) <= sum(placement.sizes) <= 1.2 * least(rehearsal)
    record(pool, work, rehearsal)
    assert pool.reserved_bytes == sum(placement.sizes)


def test_a_recording_takes_less_where_it_was_rehearsed_and_the_next_one_no_more() -> None:
    plain, pool = Made(), Made()
    record(plain, PHASES, None)
    for _ in range(2):
        record(pool, PHASES, rehearse(pool, PHASES))
        assert (plain.reserved_bytes, pool.reserved_bytes) == (36 * KIB, 24 * KIB)


CACHED: Work = [("once", 1), ("twice", 2)]  # what only the rehearsal takes, and keeps


@pytest.mark.parametrize(
    ("work", "more"),
    [
        pytest.param(PHASES, 0, id="without what the rehearsal cached"),
        pytest.param([("more", 1), ("more", 0), *PHASES], 1, id="with an array more"),
        pytest.param([*PHASES[:2], ("more", 4), ("more", 0), *PHASES[2:]], 4, id="with one of a size that comes later"),
        pytest.param([("a", 12), *PHASES[1:]], 12, id="with an array of another size"),
    ],
)
def test_a_recording_that_differs_in_an_array_is_placed_from_there_on(work: Work, more: int) -> None:
    pool = Made()
    pool.rehearsal = rehearsal = Rehearsal()
    kept = run(pool, [*CACHED, *PHASES])
    assert sorted(kept) == ["once", "twice"]
    pool.rehearsal = None
    pool.trim()
    record(pool, work, rehearsal)
    assert pool.reserved_bytes == (1 + 2 + 24 + more) * KIB


def test_what_was_taken_before_the_rehearsal_is_none_of_it() -> None:
    pool = Made()
    before = pool.allocate(8 * KIB)
    pool.rehearsal = rehearsal = Rehearsal()
    del before
    run(pool, PHASES)
    pool.rehearsal = None
    assert place(rehearsal) == place(rehearse(pool, PHASES))


def test_calls_of_work_that_takes_the_same_arrays_again() -> None:
    """Work that leaves arrays behind, returns earlier ones or finds memory short may take others the next time."""
    pool = Made()
    rehearsal = rehearse(pool, PHASES)
    assert rehearsal.calls() == [0, ~0, 1, 2, ~1, 3, ~2, ~3]
    rehearsal.spared = True
    assert rehearsal.calls() is None
    before = pool.allocate(KIB)
    pool.rehearsal = rehearsal = Rehearsal()
    kept = pool.allocate(KIB)
    assert rehearsal.calls() is None
    del kept
    assert rehearsal.calls() == [0, ~0]
    del before
    assert rehearsal.calls() is None


def test_a_pool_without_room_frees_cached_values_and_says_so() -> None:
    pool = Made()
    cached, pool.limit = [pool.allocate(8 * KIB)], 8 * KIB
    pool.spare = lambda: bool(cached.pop())
    pool.rehearsal = Rehearsal()
    assert pool.allocate(8 * KIB) is not None and pool.rehearsal.spared


@pytest.mark.parametrize("limit", [36, 20])
def test_a_dry_run_repeats_what_was_rehearsed(limit: int) -> None:
    """It takes the same memory as the work; where that is short nothing has happened, and the work decides."""
    pools = []
    for repeats in (True, False):
        dry = DryRuntime()
        dry.repeats, pool = repeats, dry._pool
        rehearsal = rehearse(pool, PHASES)
        pool.limit = limit * KIB
        pool.begin_capture(rehearsal)
        before = {name: copy(value) for name, value in vars(pool).items()} | {"_placed": None}
        done = dry.repeat(rehearsal)
        assert done == (repeats and limit == 36)
        if not done and limit == 36:
            run(pool, PHASES)
        elif not done:
            placed: Any = pool._placed
            assert vars(pool) | {"_placed": None} == before and not placed.blocks and placed._turn == 0
        pool.end_capture()
        pools.append((pool.statistics(), [size for size, *_ in pool._scratch], pool._free))
    assert pools[0] == pools[1]


def test_a_pool_returns_to_a_state_within_a_recording() -> None:
    def contents() -> dict[str, Any]:
        placed: Any = pool._placed
        values = {**vars(pool), **vars(placed), "_placed": None}
        return {name: copy(value) if isinstance(value, list | set | dict) else value for name, value in values.items()}

    pool = Made()
    record(pool, [("earlier", 2), ("earlier", 0)], None)
    rehearsal = rehearse(pool, [*PHASES, ("e", 2), ("e", 0)])
    pool.begin_capture(rehearsal)
    kept = [pool.allocate(16 * KIB)]
    state, before = pool.state(), contents()
    kept += [pool.allocate(kib * KIB) for kib in (8, 8, 4, 2)]
    assert before["_scratch"] and not pool._scratch
    pool.restore(state)
    assert contents() == before


def test_what_lives_longer_than_it_did_keeps_its_memory() -> None:
    """The placement has its block for another: that goes elsewhere."""
    pool = Made()
    left = record(pool, PHASES, rehearse(pool, PHASES), keep="a")
    assert set(left) == {"a"} and pool.in_use_bytes == 16 * KIB


@pytest.mark.parametrize("other", [[*PHASES[:5], ("e", 32), ("c", 0), ("e", 0)], [*PHASES, ("e", 2)], [("e", 2)]])
def test_other_work_than_was_rehearsed_has_memory_as_any(other: Work) -> None:
    pool = Made()
    record(pool, other, rehearse(pool, PHASES))


def test_where_there_is_no_room_for_it_the_placement_is_given_up() -> None:
    """And the pool does what it does where memory is short."""
    pool = Made()
    rehearsal = rehearse(pool, PHASES)
    spared = [pool.allocate(8 * KIB)]
    pool.reset_peak()
    pool.limit = 24 * KIB

    def spare() -> bool:
        had, spared[:] = bool(spared), []
        return had

    pool.spare = spare
    record(pool, PHASES, rehearsal)
    assert not spared and pool.peak_reserved_bytes <= pool.limit


def test_what_recordings_keep_is_lent_and_comes_back() -> None:
    """To who borrows, at any size where there is a limit; to nobody else."""
    pool = Made()
    record(pool, [("a", 16), ("b", 8), ("a", 0), ("b", 0)], None)
    kept = pool.reserved_bytes
    other = pool.allocate(16 * KIB)
    assert not other.block.scratch
    for limit in (None, pool.reserved_bytes):
        pool.limit, pool.borrowing = limit, True
        borrowed = [pool.allocate(size * KIB) for size in ((16, 8) if limit is None else (2, 9))]
        assert all(lease.block.scratch for lease in borrowed)
        pool.borrowing = False
        del borrowed
        _is_consistent(pool, pool.driver)
    assert pool.reserved_bytes == kept + 16 * KIB
    with pytest.raises(OutOfMemory, match="leaves no room"):
        pool.allocate(16 * KIB)


def test_a_device_rehearses_what_it_records_next_below_a_limit(wgpu_device: Any) -> None:
    """The same bits as without, in less memory."""
    values = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32)
    found, reserved = [], []
    for limit in (None, 1 << 30):
        device = wgpu_sibling()
        device.limit_memory(limit)
        x, out = device.upload(values), device.empty((64, 1024))

        def work(device: Any = device, x: Any = x, out: Any = out) -> None:
            wide = device.gemm(x, x, trans_a=True)  # 4 MiB
            y = device.gemm(x, wide)
            del wide
            for _ in range(2):
                y = device.softmax(device.add(x, y))
            device.copy(y, out)

        recorded = Recorded(device)
        for _ in range(2):
            recorded(work)
            device.trim()
        device.fill(out, 0.0)
        recorded(work)
        found.append(device.download(out))
        reserved.append(device.memory().reserved_bytes)
    np.testing.assert_array_equal(*found)
    assert reserved[1] < reserved[0]
