"""The memory pool when Python's garbage collector steps in: at any call, blocks may come back."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from wgrad.device import memory
from wgrad.device.errors import OutOfMemory
from wgrad.device.memory import Pool


class Driver:
    """Hands out numbers for buffers; `during` is called in each destruction."""

    def __init__(self, during: Callable[[], Any] = lambda: None) -> None:
        self.made, self.destroyed, self.during = 0, [], during  # type: ignore[var-annotated]

    def create(self, nbytes: int) -> int:
        self.made += 1
        return self.made

    def destroy(self, block: Any) -> None:
        self.destroyed.append(block.buffer)
        self.during()


def test_what_is_spared_goes_where_memory_is_short_and_is_asked_for_no_oftener() -> None:
    pool, asked = Pool(lambda nbytes: None, lambda block: None), list[bool]()
    pool.limit = 8192
    spared = [pool.allocate(4096)]

    def spare() -> bool:
        asked.append(bool(spared))
        had, spared[:] = bool(spared), []
        return had

    pool.spare = spare
    kept = [pool.allocate(4096)]
    assert not asked
    kept.append(pool.allocate(4096))
    assert asked == [True] and not spared and pool.in_use_bytes == pool.reserved_bytes == 8192
    with pytest.raises(OutOfMemory, match="the memory limit of 8,192 bytes leaves no room for 4,096 more"):
        pool.allocate(4096)
    assert asked == [True, False]


def _is_consistent(pool: Any, driver: Driver) -> None:
    assert len(set(driver.destroyed)) == len(driver.destroyed), "a block was given back twice"
    alive = {block.buffer for block in pool._blocks}
    assert alive | set(driver.destroyed) == set(range(1, driver.made + 1)) and not alive & set(driver.destroyed)
    assert pool.reserved_bytes == sum(block.nbytes for block in pool._blocks)
    assert pool.in_use_bytes + pool.free_bytes == pool.reserved_bytes


def _cycle(lease: Any) -> None:
    """Leave a lease to the collector."""
    ring: list[Any] = [lease]
    ring.append(ring)


@pytest.fixture
def _no_collection_by_itself() -> Any:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collection_by_itself")
def test_a_collection_during_a_trim_changes_nothing() -> None:
    """Blocks that a cycle holds come back while others are destroyed: none is freed twice, and the sums are right."""
    driver = Driver(gc.collect)
    pool = Pool(driver.create, driver.destroy)
    kept = [pool.allocate(4096 * (n + 1)) for n in range(4)]
    for n in range(3):
        _cycle(pool.allocate(512 * (n + 1)))
    reserved = pool.reserved_bytes
    del kept[1:]
    freed = pool.trim()
    assert len(driver.destroyed) == 3 and freed == reserved - pool.reserved_bytes
    _is_consistent(pool, driver)
    freed += pool.trim()  # what the collector brought
    assert freed == reserved - 4096 and pool.reserved_bytes == pool.in_use_bytes == 4096
    _is_consistent(pool, driver)


@pytest.mark.usefixtures("_no_collection_by_itself")
def test_a_trim_inside_a_trim_frees_each_block_once() -> None:
    driver = Driver()
    pool = Pool(driver.create, driver.destroy)
    driver.during = pool.trim
    leases = [pool.allocate(4096 * (n + 1)) for n in range(5)]
    held = leases.pop()
    del leases
    assert pool.trim() == 4096 * (1 + 2 + 3 + 4)
    assert held.block.nbytes == pool.reserved_bytes == pool.in_use_bytes
    _is_consistent(pool, driver)


def test_a_refused_destruction_keeps_the_rest() -> None:
    def refuse() -> None:
        raise RuntimeError("the device was lost")

    driver = Driver(refuse)
    pool = Pool(driver.create, driver.destroy)
    leases = [pool.allocate(4096 * (n + 1)) for n in range(3)]
    del leases
    with pytest.raises(RuntimeError, match="lost"):
        pool.trim()
    _is_consistent(pool, driver)
    driver.during = lambda: None
    pool.trim()
    assert sorted(driver.destroyed) == [1, 2, 3] and pool.reserved_bytes == 0


@pytest.mark.usefixtures("_no_collection_by_itself")
def test_a_smaller_block_freed_while_one_is_chosen_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller block that comes back between the search and the choice is not taken for the larger one."""
    driver = Driver()
    pool = Pool(driver.create, driver.destroy)
    large, small = pool.allocate(8192), pool.allocate(7168)
    del large
    _cycle(small)
    del small
    search = memory.bisect_left

    def search_then_collect(*args: Any) -> int:
        at = search(*args)
        gc.collect()
        return at

    monkeypatch.setattr(memory, "bisect_left", search_then_collect)
    assert pool.allocate(8192).block.nbytes >= 8192
    _is_consistent(pool, driver)


ENDING = """
import builtins
from wgrad.device.memory import Pool
pool = Pool(lambda nbytes: 1, lambda block: None)
builtins.kept = pool.allocate(100)  # outlives every module
"""


def test_what_is_left_at_the_end_of_python_goes_without_a_word() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_lease_that_goes_at_pythons_end_asks_for_nothing() -> None:
    """Modules that its pool needs may be gone before it, and the error would be printed at every exit."""
    pool = Pool(lambda nbytes: None, lambda block: None)
    lease = pool.allocate(64)
    lease.__del__(lambda: True)
    assert pool.in_use_bytes > 0
    del lease
    assert pool.in_use_bytes == 0
