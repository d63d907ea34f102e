"""A device that is lost or hangs is an error in time, never the end of the process; a new device then works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.portability.dawn import front_driver
from wgrad.autograd.bind import bind
from wgrad.device.errors import CompileTimeout, DeviceError, DeviceHung, DeviceLost
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.runtime import abort_guard, in_flight, submission_queue
from wgrad.wgsl.runtime.in_flight import InFlight
from wgrad.wgsl.runtime.submit_thread import SubmitThread
from wgrad.wgsl.runtime.vulkan_drivers import driver_files

# Loses the device at a call of the driver, for one number after another, each time on a new device; then lets it hang.
LOSSES = """if 1:
    import ctypes, json, sys
    import numpy as np
    from wgrad.autograd.bind import bind
    from wgrad.device.errors import DeviceHung, DeviceLost
    from wgrad.wgsl.device import WgpuDevice

    front = ctypes.CDLL(sys.argv[1])
    number = lambda name: ctypes.c_int.in_dll(front, name)

    def work(device):
        x = device.zeros((1 << 16,))
        for i in range(3):
            device.fill(x, float(i))
            device.flush()
            later = device.readback(x)
            device.write(x, np.ones(1 << 16, np.float32))
            assert later.result()[5] == i and device.download(x)[5] == 1
            device.upload(np.ones(1 << 19, np.float32))
            for _ in range(9):
                device.fill(x, 2.0)
                device.flush()
            device.synchronize()

    def attempt(at, hangs):
        device = bind(WgpuDevice)()
        number("wgrad_fault_hangs").value = hangs
        if hangs:
            device._queue.in_flight._seconds = 1.0
        number("wgrad_fault_at").value = number("wgrad_fault_calls").value + at
        try:
            work(device)
        except DeviceLost as error:
            try:
                device.synchronize()
            except type(error):
                return type(error).__name__, str(error)
        finally:
            number("wgrad_fault_at").value = -1
        return "", ""

    said = [attempt(at, False) for at in (0, 1, 2, 4, 7, 12, 19, 27)]
    in_work = len([name for name, _ in said if name])
    assert in_work == number("wgrad_fault_losses").value
    said.append(attempt(21, True))
    work(bind(WgpuDevice)())
    print(json.dumps(said))
"""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs a C compiler and lavapipe")
def test_a_lost_device_is_an_error_and_a_new_one_works(wgpu_device: Any, tmp_path: Path) -> None:
    """The library would end the process: each of these losses is found by another of its calls."""
    lavapipe = next((path for path in driver_files() if "lvp" in os.path.basename(path)), "")
    if not lavapipe:
        pytest.skip("lavapipe is not installed")
    driver = json.loads(Path(lavapipe).read_text())["ICD"]["library_path"]
    front = front_driver("cc", tmp_path, "FAULTS", driver)
    environment = {**os.environ, **front, "VK_DRIVER_FILES": front["VK_ICD_FILENAMES"]}
    command = [sys.executable, "-c", LOSSES, str(tmp_path / "front_driver.so")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    *lost, hung = json.loads(done.stdout)
    assert [name for name, _ in lost] == ["DeviceLost"] * len(lost)
    assert all(text.startswith("the device was lost while ") for _, text in lost)
    assert hung[0] == "DeviceHung" and "(launches in flight: fill" in hung[1]


def test_a_wait_is_bounded_by_the_work_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow device may take longer for more work, and as long as it likes while it finishes something."""
    monkeypatch.setenv("WGRAD_DEVICE_TIMEOUT", "10")
    flying, thread = InFlight(software=False), SubmitThread(lambda: None, RuntimeError)
    gate = threading.Event()
    stuck, hours = thread.submit(gate.wait, lambda: None), []
    flying.add(stuck, ["gemm", "gemm", "attention", "norm", "loss"], 1e11)
    assert flying.limit == 10 + 1e11 / 1e9  # of a GPU whose rate is not known
    flying.rate = lambda: 1e12
    assert flying.limit == 10 + 100 * 1e11 / 1e12

    def look(seconds: float) -> bool:
        hours.append(seconds)
        if len(hours) == 15:  # one of those before has been finished
            flying._finished += 1
        return False

    monkeypatch.setattr(type(stuck), "wait", lambda self, seconds: look(seconds))
    with pytest.raises(
        DeviceHung, match=r"finished for 20 s while .* \(launches in flight: gemm, attention, norm and 1 more"
    ):
        flying.wait(stuck)
    assert len(hours) == 35
    gate.set()
    monkeypatch.undo()
    thread.end()
    assert InFlight(software=True).limit >= 600
    for wrong in ("x", "0", "nan"):
        monkeypatch.setenv("WGRAD_DEVICE_TIMEOUT", wrong)
        with pytest.raises(DeviceError, match=f"WGRAD_DEVICE_TIMEOUT: must be seconds, above 0; got '{wrong}'"):
            InFlight(software=False)


@pytest.mark.parametrize("waits", ["synchronize", "download", "readback", "launch"])
def test_every_wait_ends_where_the_device_hangs(
    waits: str, wgpu_device: WgpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    device: Any = bind(WgpuDevice)()
    x = device.zeros((1 << 20,))
    device.fill(x, 1.0)
    device.synchronize()
    monkeypatch.setattr(in_flight, "LOOK", 0.01)
    monkeypatch.setattr(device._queue.in_flight, "_seconds", 0.05)
    gate, plain = threading.Event(), submission_queue.poll

    def hang(*given: Any, wait: bool) -> None:
        if wait:
            gate.wait()
        plain(*given, wait=wait)

    monkeypatch.setattr(submission_queue, "poll", hang)
    device.fill(x, 2.0)
    with pytest.raises(DeviceHung, match="WGRAD_DEVICE_TIMEOUT"):
        if waits == "readback":
            device.readback(x).result()
        for _ in range(20):
            if waits == "launch":
                device.fill(x, 2.0)
                device.flush()
            else:
                getattr(device, waits)(*[x] * (waits == "download"))
    with pytest.raises(DeviceHung):  # at once: nothing is given to it any more
        device.synchronize()
    del device, x  # as a test's end does: the library is not asked to give it back
    gate.set()


def test_calls_through_ctypes_do_the_same(wgpu_device: WgpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, where ctypes raises an OSError for what else would end the process."""
    monkeypatch.setattr(abort_guard, "_WINDOWS", True)
    device: Any = bind(WgpuDevice)()
    x = device.zeros((64,))
    device.fill(x, 3.0)
    assert set(device.download(x).tolist()) == {3.0}

    def panic(*_: Any) -> None:
        raise OSError("exception 0xe06d7363")

    with monkeypatch.context() as patch:
        patch.setattr(abort_guard, "_by_ctypes", lambda name: panic)
        device.fill(x, 4.0)
        with pytest.raises(DeviceLost, match="lost while submitting commands"):
            device.synchronize()
    device = device.reopen(1)
    assert set(device.download(device.zeros((64,))).tolist()) == {0.0}


def test_a_driver_that_hangs_while_it_compiles_is_given_up(
    wgpu_device: WgpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    device: Any = bind(WgpuDevice)()
    monkeypatch.setenv("WGRAD_DEVICE_TIMEOUT", "0.05")
    gate = threading.Event()
    monkeypatch.setattr(device._device, "create_compute_pipeline", lambda **_: gate.wait())
    x, dry = device.zeros((64,)), device.dry_run()
    dry.copy(dry.zeros((64,)), dry.zeros((64,)))
    told = r"^shader elementwise_copy\.wgsl \(main; .*\): the driver has compiled it for 0 s, and hangs: update it"
    for compiles in (lambda: device.copy(x, device.zeros((64,))), lambda: device.prepare(dry)):
        with pytest.raises(CompileTimeout, match=told):
            compiles()
    gate.set()


def test_a_device_lost_while_it_compiles_is_no_fault_of_a_shader(
    wgpu_device: WgpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(**_: Any) -> None:
        raise RuntimeError("Parent device is lost")

    device: Any = bind(WgpuDevice)()
    x = device.zeros((64,))
    monkeypatch.setattr(device._device, "create_compute_pipeline", lost)
    with pytest.raises(DeviceLost, match=r"the device was lost while compiling shader elementwise_copy\.wgsl"):
        device.copy(x, device.zeros((64,)))
    # The library would wait for it as it is released, and end the process.
    assert isinstance(device._queue.lost, DeviceLost) and device._device._internal is None
    with pytest.raises(DeviceLost):
        device.synchronize()


def test_a_lost_device_is_released_once(wgpu_device: WgpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server opens one again that did not open the first time: a second release would be of freed memory."""
    device: Any = bind(WgpuDevice)()
    released: list[int] = []
    monkeypatch.setattr(device._queue._thread, "end_with", lambda *given: released.append(len(given)))
    for _ in range(2):
        device.close()
    assert released == [3] and isinstance(device._queue.lost, DeviceLost)


def test_a_device_lost_before_a_mapped_buffer_is_read_is_reported(
    wgpu_device: WgpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library then has no memory to read from."""
    device: Any = bind(WgpuDevice)()
    x = device.zeros((64,))
    device.synchronize()
    plain = submission_queue.lib

    class Without:
        def __getattr__(self, name: str) -> Any:
            none = name == "wgpuBufferGetConstMappedRange"
            return (lambda *_: submission_queue.ffi.NULL) if none else getattr(plain, name)

    monkeypatch.setattr(submission_queue, "lib", Without())
    with pytest.raises(DeviceLost, match="lost while reading from the device"):
        device.download(x)


def test_a_buffer_mapped_after_the_program_has_ended_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost device is released with its queue, which answers for all that was under way."""
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    monkeypatch.setattr(submission_queue, "_under_way", None)  # as Python leaves a module
    null = submission_queue.ffi.NULL
    submission_queue._mapped(2, submission_queue.ffi.new("WGPUStringView *")[0], null, null)
    assert ignored == []
