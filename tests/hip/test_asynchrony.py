"""Streams, events and the life of memory: each test is red where the room does not wait, keep or record what it must.
Work runs as late as it can, and in the order of this run's seed; $WGRAD_EMULATED_SEED names another."""

from __future__ import annotations

import gc
from threading import Thread
from typing import Any

import numpy as np
import pytest

from wgrad.device.errors import DeviceError
from wgrad.hip.runtime.binding import check

SIZE = 1003


@pytest.fixture(params=["late", "seed"])
def device(emulator: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "late":
        monkeypatch.setenv("WGRAD_EMULATED_SEED", "late")
    yield emulator.new("gfx942")
    emulator.clear()


def numbers(start: float, size: int = SIZE) -> np.ndarray:
    return (start + np.arange(size)).astype(np.float32)


def test_a_download_waits(device: Any) -> None:
    x = device.upload(numbers(1))
    for _ in range(5):
        device.add(x, x, out=x)
    np.testing.assert_array_equal(device.download(x), 32 * numbers(1))
    host = device.empty_host((SIZE,))
    device.transfer(x, host)
    np.testing.assert_array_equal(device.download(host), 32 * numbers(1))


def test_an_upload_outlives_its_host_array(device: Any) -> None:
    """The copy is of what was given, and its memory is there when it runs: also after many others."""
    given = numbers(3)
    kept = [device.upload(given), device.upload(numbers(0))]
    device.write(kept[1], given + 1)
    given[:] = -1
    kept += [device.upload(numbers(n)) for n in range(300)]
    wanted = [numbers(3), numbers(4), *(numbers(n) for n in range(300))]
    for array, want in zip(kept, wanted):
        np.testing.assert_array_equal(device.download(array), want)


def test_uploads_do_not_pile_up(device: Any) -> None:
    """The source of a copy under way is kept, but not forever."""
    for _ in range(600):
        device.upload(numbers(0, 3))
        assert len(device._uploads) <= 256
    x = device.empty((20 << 20,), np.uint8)
    for _ in range(6):
        device.write(x, np.zeros(20 << 20, np.uint8))
        assert sum(data.nbytes for data in device._uploads) <= 64 << 20


def test_a_readback_is_there_when_it_says_so(device: Any) -> None:
    x = device.upload(numbers(1))
    first = device.readback(x)
    device.add(x, x, out=x)
    second = device.readback(x)
    if second.ready():
        assert first.ready()
    np.testing.assert_array_equal(second.result(), 2 * numbers(1))
    np.testing.assert_array_equal(first.result(), numbers(1))
    space = np.full(SIZE + 2, -1, np.float32)
    third = device.readback(
        device.scale(x, 2.0), space[1:-1]
    )  # into pinned memory of the others, then where it is told
    assert third.result().base is space and space[0] == space[-1] == -1
    np.testing.assert_array_equal(space[1:-1], 4 * numbers(1))


def test_abandoned_readbacks_free_their_pinned_memory(device: Any) -> None:
    """Their pinned memory goes, and nothing is copied into it afterwards."""
    x = device.upload(numbers(1))
    for _ in range(3):
        device.readback(x)
    gc.collect()
    np.testing.assert_array_equal(device.download(x), numbers(1))


def test_more_readbacks_than_are_kept_each_have_their_values(device: Any) -> None:
    x = device.upload(numbers(1))
    under_way = []
    for _ in range(12):
        under_way.append(device.readback(x))
        device.add(x, x, out=x)
    for n, readback in enumerate(under_way):
        np.testing.assert_array_equal(readback.result(), 2.0**n * numbers(1))


def test_a_recording_keeps_its_arrays(device: Any) -> None:
    """The arrays that its launches and transfers read and write live on, even if nothing else holds them."""
    x, y, z = (device.upload(numbers(n)) for n in (1, 2, 3))
    total, offloaded, unused = device.empty_host((SIZE,)), device.empty_host((SIZE,)), device.empty((SIZE,))
    with device.capture() as replay:
        device.transfer(device.add(x, y), total)
        device.transfer(z, offloaded)
        device.add(x, y, out=unused)
    del x, y, z, unused
    gc.collect()
    others = [device.upload(numbers(n)) for n in (100, 200, 300, 400)]
    for _ in range(2):
        replay.run()
    np.testing.assert_array_equal(device.download(total), numbers(1) + numbers(2))
    np.testing.assert_array_equal(device.download(offloaded), numbers(3))
    for other, n in zip(others, (100, 200, 300, 400)):
        np.testing.assert_array_equal(device.download(other), numbers(n))


def test_a_recordings_scratch_is_lent_to_nobody(device: Any) -> None:
    x, out = device.upload(numbers(1)), device.empty((SIZE,))
    with device.capture() as replay:
        device.add(device.scale(x, 2.0), device.scale(x, 3.0), out=out)
    others = [device.upload(numbers(n)) for n in (100, 200, 300)]
    replay.run()
    for other, n in zip(others, (100, 200, 300)):
        np.testing.assert_array_equal(device.download(other), numbers(n))
    np.testing.assert_array_equal(device.download(out), 5 * numbers(1))
    device.trim()
    replay.run()
    np.testing.assert_array_equal(device.download(out), 5 * numbers(1))


def test_memory_is_given_back_when_the_work_on_it_is_done(device: Any) -> None:
    x, host = device.upload(numbers(1)), device.empty_host((SIZE,))
    doubled = device.scale(x, 2.0)
    device.transfer(doubled, host)
    out = device.scale(doubled, 2.0)
    del doubled, x, host
    assert device._host_pool.trim() > 0
    np.testing.assert_array_equal(device.download(device.scale(out, 2.0)), 8 * numbers(1))
    doubled = device.scale(out, 2.0)
    again = device.scale(doubled, 2.0)
    del doubled
    assert device.trim() > 0
    np.testing.assert_array_equal(device.download(again), 16 * numbers(1))


def test_a_replay_may_go_while_it_runs(device: Any) -> None:
    x = device.upload(numbers(1))
    with device.capture() as replay:
        device.add(x, x, out=x)
    replay.run()
    del replay
    np.testing.assert_array_equal(device.download(x), 4 * numbers(1))


def test_a_profile_waits_for_its_events(device: Any) -> None:
    device.profile()
    x = device.upload(numbers(1))
    for _ in range(3):
        device.add(x, x, out=x)
    assert (
        next(line for line in device.profile_table().splitlines() if line.startswith("elementwise")).split()[1] == "3"
    )
    device.profile(False)


def test_a_capture_refuses_waits_and_allocations(device: Any) -> None:
    """As HIP documents it: no wait for the stream; in the global and thread-local modes no memory either; the graph is
    then invalid."""
    hip, stream = device._hip, device._stream
    refused = {2: lambda: hip.hipStreamSynchronize(stream), 0: lambda: hip.hipMalloc(16), 1: lambda: hip.hipMalloc(16)}
    for mode, call in refused.items():
        check(hip.hipStreamBeginCapture(stream, hip.hipStreamCaptureMode(mode)), "begin")
        with pytest.raises(DeviceError, match="StreamCaptureUnsupported"):
            check(call(), "a call")
        with pytest.raises(DeviceError, match="StreamCaptureInvalidated"):
            check(hip.hipStreamEndCapture(stream), "end")
    check(hip.hipStreamBeginCapture(stream, hip.hipStreamCaptureMode(2)), "begin")
    check(hip.hipMalloc(16), "in the relaxed mode")
    event = check(hip.hipEventCreate(), "an event")
    check(hip.hipEventRecord(event, stream), "recorded into the graph")
    with pytest.raises(DeviceError, match="CapturedEvent"):
        check(hip.hipEventSynchronize(event), "waiting")
    check(hip.hipStreamEndCapture(stream), "end")


def test_memory_may_be_allocated_while_a_graph_is_recorded(
    device: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By this thread and others: only the relaxed mode of a capture allows both."""
    hip, x = device._hip, device.upload(numbers(1))
    launch, calls = hip.hipModuleLaunchKernel, []

    def allocate() -> None:
        check(hip.hipMalloc(16), "while a graph is recorded")
        calls.append(1)

    def launch_and_allocate(*given: Any) -> Any:
        other = Thread(target=allocate)
        other.start()
        other.join()
        allocate()
        return launch(*given)

    with device.capture() as replay:
        device.add(x, x, out=x)
    monkeypatch.setattr(hip, "hipModuleLaunchKernel", launch_and_allocate)
    replay.run()
    assert device._graphs and not caplog.records and len(calls) == 2  # of one launch, so recorded it was
    np.testing.assert_array_equal(device.download(x), 4 * numbers(1))


def test_an_uninitialized_or_freed_array_reads_as_nan(device: Any) -> None:
    assert np.isnan(np.empty(SIZE)).all()
    x = device.upload(numbers(1))
    address = x.address
    del x
    y = device.empty((SIZE,))
    assert y.address == address and np.isnan(device.download(y)).all()
