"""Host memory that a device reads and writes itself: in order with other work, in recordings, on every device.

Also the limit of a memory pool.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.conftest import wgpu_sibling
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.errors import DeviceError, OutOfMemory, ShapeError
from wgrad.device.memory import Pool


@pytest.fixture(params=["wgpu", "hip", "cpu"])
def device(request: pytest.FixtureRequest) -> Any:
    if request.param == "cpu":
        return ReferenceDevice()
    if request.param == "hip":
        return request.getfixturevalue("emulator").device("gfx942")
    request.getfixturevalue("wgpu_device")
    return wgpu_sibling()


def numbers(size: int, start: float = 0.0) -> np.ndarray:
    return (start + np.arange(size)).astype(np.float32)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_round_trip_through_main_memory(device: Any, size: int) -> None:
    host, back = device.empty_host((size,)), device.empty((size,))
    device.transfer(device.scale(device.upload(numbers(size)), 2.0), host)
    np.testing.assert_array_equal(device.download(host), 2 * numbers(size))
    device.write(host, numbers(size, 3))
    device.transfer(host, back)
    np.testing.assert_array_equal(device.download(back), numbers(size, 3))


def test_transfers_keep_their_place_among_launches_and_in_a_replay(device: Any) -> None:
    """x is scaled, offloaded, scaled again in place, brought back: each copy sees just what came before it."""
    x, offloaded = device.upload(numbers(77)), device.empty_host((77,))
    first, second = device.empty((77,)), device.empty((77,))

    def work() -> None:
        twice = device.scale(x, 2.0)
        device.transfer(twice, offloaded)
        device.transfer(offloaded, first)
        device.add(twice, twice, out=twice)
        device.transfer(twice, offloaded)
        device.transfer(offloaded, second)

    with device.capture() as replay:
        work()
    for start in (5.0, -9.0):
        device.write(x, numbers(77, start))
        replay.run()
        np.testing.assert_array_equal(device.download(first), 2 * numbers(77, start))
        np.testing.assert_array_equal(device.download(second), 4 * numbers(77, start))


def test_a_shader_reads_a_table_where_it_lies(device: Any) -> None:
    table = device.empty_host((9, 5))
    device.write(table, numbers(45).reshape(9, 5))
    rows = device.embedding(table, device.upload(np.array([8, 0, 3], np.int32)))
    np.testing.assert_array_equal(device.download(rows), numbers(45).reshape(9, 5)[[8, 0, 3]])


def test_main_memory_is_counted_by_itself_and_a_recordings_is_lent_to_nobody(device: Any) -> None:
    before = device.memory().in_use_bytes
    kept = device.empty_host((1 << 16,))
    if not isinstance(device, ReferenceDevice):
        assert device.memory().in_use_bytes == before and device.host_memory().in_use_bytes >= kept.nbytes
    x, out = device.upload(numbers(64)), device.empty((64,))
    with device.capture() as replay:
        offloaded = device.empty_host((64,))
        device.transfer(x, offloaded)
        device.transfer(offloaded, out)
        del offloaded
    other = device.empty_host((64,))
    device.write(other, numbers(64, 100))
    replay.run()
    np.testing.assert_array_equal(device.download(other), numbers(64, 100))


def test_a_recording_keeps_what_it_only_transfers(device: Any) -> None:
    x, out = device.upload(numbers(64)), device.empty((64,))
    offloaded = device.empty_host((64,))
    with device.capture() as replay:
        device.transfer(x, offloaded)
        device.transfer(offloaded, out)
    del x, out, offloaded
    others = [device.upload(numbers(64, 100)), device.upload(numbers(64, 200)), device.empty_host((64,))]
    device.write(others[2], numbers(64, 300))
    replay.run()
    for other, start in zip(others, (100, 200, 300)):
        np.testing.assert_array_equal(device.download(other), numbers(64, start))


def test_a_recordings_memory_is_free_when_it_is_gone_and_no_other_has_it(device: Any) -> None:
    if isinstance(device, ReferenceDevice):
        pytest.skip("no pool")
    x, outs = device.upload(numbers(1 << 16)), [device.empty((1 << 16,)) for _ in range(2)]
    device.trim()
    start, replays = device.memory().reserved_bytes, []
    for out in outs:
        with device.capture() as replay:
            device.copy(device.scale(device.scale(x, 2.0), 3.0), out)
        replays.append(replay)
    del replay
    assert device.trim() == 0
    kept = device.memory().reserved_bytes
    for left in (1, 0):
        del replays[0]
        device.trim()
        assert device.memory().reserved_bytes == (kept if left else start)
        for replay in replays:
            replay.run()
            np.testing.assert_array_equal(device.download(outs[1]), 6 * numbers(1 << 16))
            del replay
    with device.capture():
        device.copy(device.scale(device.scale(x, 2.0), 3.0), outs[0])
    before = device.memory().reserved_bytes
    others = [device.empty((1 << 16,)) for _ in range(2)]
    assert before > start and device.memory().reserved_bytes == before and len(others) == 2


def test_who_borrows_leaves_recordings_their_memory(device: Any) -> None:
    """Arrays made in the block may lie there, arrays made after it do not; and a replay gives the same as before."""
    x, out = device.upload(numbers(64)), device.empty((64,))
    with device.capture() as replay:
        device.copy(device.scale(device.scale(x, 2.0), 3.0), out)
    with device.borrowing():
        borrowed = [device.scale(x, float(n)) for n in range(4)]
        for n, array in enumerate(borrowed):
            np.testing.assert_array_equal(device.download(array), n * numbers(64))
    del borrowed, array
    others = [device.upload(numbers(64, start)) for start in range(4)]
    replay.run()
    for start, other in enumerate(others):
        np.testing.assert_array_equal(device.download(other), numbers(64, start))
    np.testing.assert_array_equal(device.download(out), 6 * numbers(64))


def test_shapes_are_checked(device: Any) -> None:
    with pytest.raises(ShapeError, match="transfer: out must have the size"):
        device.transfer(device.empty_host((4,)), device.empty((5,)))


def test_a_gpu_without_such_buffers_says_so(wgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = wgpu_sibling()
    monkeypatch.setattr(device, "host_buffers", False)
    with pytest.raises(DeviceError, match="has no mappable-primary-buffers: it cannot reach main memory by itself"):
        device.empty_host((4,))


def test_profiling_takes_transfers_along(wgpu_device: Any) -> None:
    device = wgpu_sibling()
    if not device.profile():
        pytest.skip("no timestamps")
    offloaded = device.empty_host((64,))
    device.transfer(device.scale(device.upload(numbers(64)), 2.0), offloaded)
    device.flush()
    assert "elementwise" in device.profile_table()
    np.testing.assert_array_equal(device.download(offloaded), 2 * numbers(64))


# ---- the limit ---------------------------------------------------------------------------
def pool_with(limit: int) -> Pool:
    pool = Pool(lambda nbytes: object(), lambda block: None)
    pool.limit = limit
    return pool


def test_the_pool_never_takes_more_than_its_limit() -> None:
    pool = pool_with(10_000)
    held = [pool.allocate(4096), pool.allocate(4096)]
    with pytest.raises(OutOfMemory, match=r"limit of 10,000 bytes leaves no room for 4,096 more: 8,192 are in use"):
        pool.allocate(4096)
    held.pop()
    held.append(pool.allocate(5120))  # the free block of another size went for it
    assert pool.reserved_bytes == pool.peak_reserved_bytes - 0 == 9216 <= 10_000


def test_at_the_limit_a_recording_lends_itself_a_far_larger_block_and_destroys_none_of_its_own() -> None:
    destroyed: list[int] = []
    pool = Pool(lambda nbytes: object(), lambda block: destroyed.append(block.nbytes))
    pool.limit = 10_000
    pool.begin_capture()
    first = pool.allocate(8192)
    del first
    second = pool.allocate(2048)  # no room beside it, and the replay still writes to it
    assert second.block.nbytes == 8192 and not destroyed
    pool.end_capture()
    del second
    with pytest.raises(OutOfMemory):  # what belongs to recordings is lent to nobody else
        pool.allocate(2048)
    pool.begin_capture()
    assert pool.allocate(1024).block.nbytes in (1024, 8192)
    pool.end_capture()


def test_a_device_and_its_dry_run_hold_to_the_limit(wgpu_device: Any) -> None:
    for device in (wgpu_sibling(), wgpu_device.dry_run()):
        device.limit_memory(device.memory().reserved_bytes + (1 << 20))
        kept = device.empty((1 << 17,))
        with pytest.raises(OutOfMemory, match="the memory limit of"):
            device.empty((1 << 18,))
        del kept
        device.empty((1 << 18,))
        device.limit_memory(None)
        device.empty((1 << 20,))
