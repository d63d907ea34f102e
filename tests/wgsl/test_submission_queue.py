"""The submission queue: work reaches the device in order, from any thread, and each failure is raised once."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from wgrad.autograd.bind import bind
from wgrad.device.errors import DeviceError
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.runtime import native, submission_queue
from wgrad.wgsl.runtime.runtime import MAX_GROUPS
from wgrad.wgsl.runtime.submission_queue import MAX_IN_FLIGHT, MAX_SHORT_IN_FLIGHT, STAGED_BYTES
from wgrad.wgsl.runtime.submit_thread import SubmitThread

LATE = 0.02  # seconds


@pytest.fixture
def fresh(wgpu_device: WgpuDevice) -> Iterator[WgpuDevice]:
    """A device of this test's own, whose submissions are late: what does not wait for them comes before them."""
    device: Any = bind(WgpuDevice)()
    submit = device._queue._submit

    def late(encoder: Any, doing: str) -> Any:
        if threading.current_thread().name.startswith("wgrad-submit"):
            time.sleep(LATE)
        return submit(encoder, doing)

    device._queue._submit = late
    yield device
    del device._queue._submit


# ---- order ---------------------------------------------------------------------------------
def test_what_is_recorded_is_submitted_by_another_thread(fresh: Any) -> None:
    """Recording does not wait for it: here nothing is submitted before all is recorded."""
    x = fresh.zeros((64,))
    fresh.fill(x, 3.0)
    fresh.synchronize()
    recorded, names, submit = threading.Event(), list[str](), fresh._queue._submit

    def gated(encoder: Any, doing: str) -> Any:
        assert recorded.wait(30)
        names.append(threading.current_thread().name)
        return submit(encoder, doing)

    fresh._queue._submit = gated
    for _ in range(MAX_IN_FLIGHT):
        fresh.fill(x, 3.0)
        fresh.flush()
    assert names == []
    recorded.set()
    fresh.synchronize()
    assert names == ["wgrad-submit"] * MAX_IN_FLIGHT


@pytest.mark.parametrize("nbytes", [4, 6, STAGED_BYTES + 4])
def test_a_write_comes_behind_what_was_recorded(nbytes: int, fresh: Any) -> None:
    ones = np.ones(nbytes // 2, np.float16)
    target, copied = fresh.zeros((nbytes // 2 + 3,), np.float16), fresh.zeros(ones.shape, np.float16)
    array = fresh.view(target, ones.shape)
    fresh.synchronize()
    fresh.fill(array, 3.0)
    fresh.copy(array, copied)
    fresh.fill(target, 4.0)
    fresh.write(array, ones)
    assert set(fresh.download(copied).tolist()) == {3.0}
    assert fresh.download(target).tolist() == [1.0] * ones.size + [4.0] * 3


@pytest.mark.parametrize("later", [False, True])
def test_what_is_read_was_recorded_before(later: bool, fresh: Any) -> None:
    x = fresh.zeros((1000,))
    fresh.synchronize()
    fresh.fill(x, 3.0)
    if later:
        given = fresh.readback(x)
        fresh.fill(x, 4.0)
        fresh.flush()
        result = given.result()
    else:
        result = fresh.download(x)
    assert set(result.tolist()) == {3.0}


def test_all_is_done_when_the_device_is_waited_for(fresh: Any) -> None:
    x = fresh.zeros((64,))
    fresh.fill(x, 3.0)
    fresh.synchronize()
    word = fresh._device.queue.read_buffer(x.lease.block.buffer, x.offset, 4)  # by wgpu-py: waits for nothing of ours
    assert np.frombuffer(word, np.float32).tolist() == [3.0]


def test_a_profile_begins_behind_what_was_recorded(fresh: Any) -> None:
    if "timestamp-query" not in fresh._device.features:
        pytest.skip("the device has no timestamp-query")
    x, y = fresh.zeros((64,)), fresh.zeros((64,))
    fresh.copy(x, y)  # compiles
    fresh.synchronize()
    fresh.fill(x, 3.0)
    fresh.flush()
    fresh.profile()
    fresh.copy(x, y)
    assert set(fresh.download(y).tolist()) == {3.0}


def test_memory_is_given_back_behind_what_was_recorded(fresh: Any) -> None:
    """wgpu refuses a submission that uses a buffer which is no more."""
    x, y = fresh.zeros((1 << 20,)), fresh.zeros((4,))
    fresh.synchronize()
    fresh.fill(x, 3.0)
    fresh.copy(fresh.view(x, (4,)), y)
    del x
    fresh.trim()
    assert fresh.download(y).tolist() == [3.0] * 4


# ---- errors --------------------------------------------------------------------------------
def test_a_refused_submission_is_raised_once_and_nothing_behind_it_is_done(fresh: Any) -> None:
    """By the next call that waits for it; the device is then as good as before."""
    x, y, given = fresh.zeros((64,)), fresh.zeros((64,)), list[Any]()
    fresh.synchronize()
    fresh._queue.submit, submit = lambda dispatches, *_: given.append(dispatches), fresh._queue.submit
    fresh.fill(x, 3.0)
    fresh.flush()
    fresh.fill(y, 4.0)
    fresh.flush()
    (first,), (last,) = given
    del fresh._queue.submit
    too_many = [(*first[:2], MAX_GROUPS + 1, 1, 1)]  # of which wgpu says so when the encoder is ended

    for dispatches in ([first], too_many, too_many, [last]):
        submit(dispatches)
    refused = "^the device refused work while submitting commands: .*dispatch"
    with pytest.raises(DeviceError, match=refused):
        fresh.synchronize()
    fresh.synchronize()
    assert set(fresh.download(x).tolist()) == {3.0}
    assert set(fresh.download(y).tolist()) == {0.0}
    submit([last])
    assert set(fresh.download(y).tolist()) == {4.0}
    with pytest.raises(DeviceError, match=refused):
        for _ in range(MAX_IN_FLIGHT + 1):  # the last one waits for old ones
            submit(too_many)
    assert not fresh._queue.in_flight
    for _ in range(MAX_IN_FLIGHT + 1):
        submit([last])
    fresh.synchronize()


def test_what_another_thread_caused_is_none_of_a_submissions(fresh: Any) -> None:
    x = fresh.zeros((64,))
    for value in (4.0, 3.0):  # what they take is written
        fresh.fill(x, value)
    fresh.synchronize()
    logging.getLogger("wgpu").error("of this one")
    fresh.fill(x, 4.0)
    with pytest.raises(DeviceError, match="waiting for the device: of this one$"):
        fresh.synchronize()
    assert set(fresh.download(x).tolist()) == {4.0}


def test_what_the_submitting_thread_causes_is_said_to_no_other() -> None:
    log, said = native.error_log(), list[str]()

    def submitting() -> None:
        log.keep_apart()
        logging.getLogger("wgpu").error("of the thread")
        try:
            log.raise_if_any("submitting")
        except DeviceError as error:
            said.append(str(error))

    logging.getLogger("wgpu").error("of this one")
    thread = threading.Thread(target=submitting)
    thread.start()
    thread.join()
    assert said == ["the device refused work while submitting: of the thread"]
    with pytest.raises(DeviceError, match="waiting: of this one$"):
        log.raise_if_any("waiting")
    log.raise_if_any("waiting")


# ---- the thread ----------------------------------------------------------------------------
def test_the_thread_does_its_work_in_order() -> None:
    begun, done = list[str](), list[int]()
    thread = SubmitThread(lambda: begun.append(threading.current_thread().name), RuntimeError)
    thread.drain()
    assert begun == []

    def work(number: int) -> Callable[[], int]:
        def one() -> int:
            time.sleep(0.001 * (5 - number))
            done.append(number)
            return number

        return one

    results = [thread.submit(work(n), lambda: done.append(-1)) for n in range(5)]
    thread.drain()
    assert done == list(range(5)) and [result.result() for result in results] == done
    assert len(begun) == 1 and begun[0].startswith("wgrad-submit")
    assert thread.cpu > 0
    thread.drain()
    thread.end()
    assert thread.submit(work(4), lambda: None).result() == 4  # while the program ends, say
    thread.drain()


def test_what_was_handed_over_is_done_before_a_program_ends() -> None:
    program = """if 1:
        import os, time
        from wgrad.wgsl.runtime.submit_thread import SubmitThread
        thread = SubmitThread(lambda: None, RuntimeError)
        for _ in range(3):
            thread.submit(lambda: (time.sleep(0.1), os.write(1, b"done ")), print)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done " * 3, "")


def test_what_fails_on_the_thread_is_raised_first_and_what_is_behind_it_dropped() -> None:
    thread, done = SubmitThread(lambda: None, RuntimeError), list[str]()

    def fail(text: str) -> Callable[[], None]:
        def one() -> None:
            raise DeviceError(text)

        return one

    for turn in range(2):
        last = [thread.submit(fail(f"first {turn}"), lambda: None)]
        last.append(thread.submit(fail("second"), lambda: done.append("dropped")))
        last.append(thread.submit(lambda: done.append("done"), lambda: done.append("dropped")))
        with pytest.raises(DeviceError, match=f"first {turn}"):
            thread.drain()
        assert [result.result() for result in last] == [None] * 3
        assert done == ["dropped"] * 2 * (turn + 1)
        thread.drain()


def test_the_thread_ends_with_its_device(wgpu_device: WgpuDevice) -> None:
    def threads() -> set[threading.Thread]:
        gc.collect()
        return {thread for thread in threading.enumerate() if thread.name.startswith("wgrad-submit")}

    before = threads()
    device: Any = bind(WgpuDevice)()
    device.fill(device.zeros((64,)), 1.0)
    device.synchronize()
    (mine,) = threads() - before
    del device
    gc.collect()
    mine.join(10)
    assert not mine.is_alive()


@pytest.mark.parametrize("ending", ["", "raise SystemExit(7)", "raise KeyboardInterrupt", "os._exit(7)"])
def test_a_program_may_end_at_any_time(ending: str, wgpu_device: WgpuDevice) -> None:
    """With work under way, which nobody waits for."""
    program = """if 1:
        import os
        from wgrad.autograd.bind import bind
        from wgrad.wgsl.device import WgpuDevice
        device = bind(WgpuDevice)()
        x = device.zeros((1 << 20,))
        for _ in range(50):
            device.add(x, x, out=x)
            device.flush()
        """
    done = subprocess.run([sys.executable, "-c", program + ending], capture_output=True, text=True, timeout=120)
    said = {"raise KeyboardInterrupt": (-2, "KeyboardInterrupt"), "": (0, "")}.get(ending, (7, ""))
    assert (done.returncode, (done.stderr.splitlines() or [""])[-1]) == said


# ---- waits and buffers ---------------------------------------------------------------------
def test_half_of_what_is_in_flight_is_waited_for_at_once(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that was woken is slow at first: it wakes once for several submissions, and leaves the device some."""
    x, queue, waits, submitted = fresh.zeros((64,)), fresh._queue, list[int](), list[Any]()
    fresh.synchronize()
    submit, wait = queue._submit, queue._see_finished

    def noted(*given: Any) -> Any:
        submitted.append(submit(*given))
        return submitted[-1]

    def waited(flights: Any, *more: Any) -> None:
        last = flights[-1].submitted.result()
        wait(flights, *more)
        waits.append(len(submitted) - 1 - submitted.index(last))

    monkeypatch.setattr(queue, "_submit", noted)
    monkeypatch.setattr(queue, "_see_finished", waited)
    for _ in range(3 * MAX_IN_FLIGHT):
        fresh.launch("fill", [x], [64, 0, 0], (1, 1, 1))
        fresh.flush()
    assert len(waits) <= 4 and set(waits) == {MAX_IN_FLIGHT // 2}  # so many are left for the device, all submitted


@pytest.mark.parametrize(("work", "most"), [(0.0, MAX_SHORT_IN_FLIGHT), (1e11, MAX_IN_FLIGHT)])
def test_of_short_submissions_more_are_in_flight(
    work: float, most: int, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, waits = fresh._queue, list[int]()
    monkeypatch.setattr(queue.in_flight, "_software", False)
    monkeypatch.setattr(queue.in_flight, "rate", lambda: 0.0)
    monkeypatch.setattr(queue, "_see_finished", lambda flights: waits.append(len(flights)))
    for number in range(most + 1):
        assert not waits, number
        queue.submit([], work=work)
    assert waits == [most // 2 + 1]


def test_readbacks_share_memory_one_after_another(wgpu_device: WgpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer of one that is done serves the next of its size, none that is in flight; what is kept has a limit."""
    ones, twos = (wgpu_device.upload(np.full(1000, value, np.float32)) for value in (1, 2))
    first = wgpu_device.readback(ones).result()
    pending = [wgpu_device.readback(array) for array in (twos, ones, twos)]
    assert [later.result().tolist() for later in pending] == [[value] * 1000 for value in (2, 1, 2)]
    assert first.tolist() == [1] * 1000
    queue = wgpu_device._queue
    kept = queue._staging[-1]
    wgpu_device.readback(ones).result()
    assert kept in queue._staging
    monkeypatch.setattr(queue, "_staging", [])
    monkeypatch.setattr(submission_queue, "_MOST_STAGING_BYTES", 10_000)
    for size in (1000, 500, 1000, 900):
        wgpu_device.readback(wgpu_device.view(ones, (size,))).result()
    assert [staging.size for staging in queue._staging] == [2000, 4000, 3600]
    wgpu_device.readback(wgpu_device.view(ones, (300,))).result()  # what was used longest ago goes for it
    assert [staging.size for staging in queue._staging] == [4000, 3600, 1200]
    monkeypatch.setattr(submission_queue, "_MOST_STAGING_BYTES", 0)
    wgpu_device.readback(ones).result()
    assert queue._staging == []


def test_download_later_holds_what_was_there_when_asked(wgpu_device: WgpuDevice) -> None:
    array = wgpu_device.upload(np.arange(7, dtype=np.float16))
    later = wgpu_device.readback(array)
    wgpu_device.fill(array, 9.0)
    assert np.array_equal(later.result(), np.arange(7)) and later.ready()
    assert np.array_equal(wgpu_device.download(array), np.full(7, 9.0))
