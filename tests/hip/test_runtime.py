"""The HIP runtime: errors that say what to do, the pool, replay as a graph, the profile."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from wgrad.hip import binding
from wgrad.hip.binding import check
from wgrad.hip.errors import DeviceError, DeviceLost, OutOfMemory
from wgrad.hip.runtime import Long


def test_the_card_is_named(hip_device: Any) -> None:
    assert hip_device.architecture in hip_device.description
    assert hip_device.wave == (64 if hip_device.architecture == "gfx942" else 32)


def test_access_past_the_end_names_the_kernel(hip_device: Any, emulator: Any) -> None:
    x = hip_device.zeros((41,))
    with pytest.raises(DeviceLost, match=r"kernel fill on \(float32\[41\]\), \(1, 1, 1\) work-groups of 256"):
        hip_device.launch("storage", "fill", [x, 0, Long(x.nbytes + 64)], (1, 1, 1))
    assert "after the end of an allocation of 176 bytes" in emulator.last_failure
    with pytest.raises(DeviceLost):  # the device stays lost
        hip_device.download(x)


def test_wrong_launches_are_refused(hip_device: Any) -> None:
    x = hip_device.zeros((64,))
    with pytest.raises(DeviceError, match="no kernel 'nothing'"):
        hip_device.launch("storage", "nothing", [x], (1, 1, 1))
    with pytest.raises(DeviceError, match="kernel fill.*hipErrorInvalidValue"):
        hip_device.launch("storage", "fill", [x], (1, 1, 1))
    with pytest.raises(DeviceError, match="hipErrorInvalidValue"):
        hip_device.launch("storage", "fill", [x, 0, Long(4)], (1, 1, 1), threads=128)
    np.testing.assert_array_equal(hip_device.download(x), np.zeros(64))


def test_array_of_another_device(emulator: Any) -> None:
    one, other = emulator.new("gfx942"), emulator.new("gfx942")
    with pytest.raises(DeviceError, match="upload it to this device"):
        one.add(one.zeros((64,)), other.zeros((64,)))
    with pytest.raises(DeviceError, match="upload it to this device"):
        one.download(np.zeros(3))


def test_code_object_of_another_architecture(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = emulator.new("gfx942")
    emulator.build("storage", "gfx1100")
    device.modules.architecture = "gfx1100"
    with pytest.raises(DeviceError, match="cannot be loaded on gfx1100.*wgrad.hip.build"):
        device.zeros((3,))


def test_missing_code_object(emulator: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = emulator.new("gfx942")
    monkeypatch.setenv("WGRAD_HIP_OBJECTS", str(tmp_path))
    with pytest.raises(DeviceError, match=r"gfx942/storage.co"):
        device.zeros((3,))


def test_full_card(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = emulator.new("gfx942")
    monkeypatch.setenv("WGRAD_EMULATED_MEMORY", str(64 << 20))
    with pytest.raises(OutOfMemory, match="104,857,600 bytes.*batch-size"):
        device.empty((100 << 20,), np.uint8)


def test_free_memory_is_given_back_before_giving_up(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = emulator.new("gfx942")
    gc.collect()  # what other tests' devices still hold counts as well
    free, total = (int(v) for v in check(device._hip.hipMemGetInfo(), "asking for free memory"))
    monkeypatch.setenv("WGRAD_EMULATED_MEMORY", str(total - free + (64 << 20)))
    device.empty((20 << 20,), np.uint8)
    device.empty((30 << 20,), np.uint8)
    assert device.memory().reserved_bytes == 50 << 20
    assert device.empty((60 << 20,), np.uint8).nbytes == 60 << 20


def test_pool_does_not_grow(hip_device: Any) -> None:
    def step() -> None:
        x = hip_device.zeros((41, 67))
        hip_device.add(hip_device.scale(x, 2.0), x)

    step()
    reserved = hip_device.memory().reserved_bytes
    compiled = hip_device.pipelines_compiled()
    for _ in range(5):
        step()
    assert hip_device.memory().reserved_bytes == reserved
    assert hip_device.pipelines_compiled() == compiled


def test_replay_sees_new_values(hip_device: Any) -> None:
    x, total = hip_device.upload(np.full(67, 3, np.float32)), hip_device.zeros((67,))
    with hip_device.capture() as recorded:
        hip_device.add(total, hip_device.mul(x, x), out=total)
    assert recorded.names == ["elementwise", "elementwise"]
    hip_device.write(x, np.full(67, 5, np.float32))
    recorded.run()
    recorded.run()
    np.testing.assert_array_equal(hip_device.download(total), np.full(67, 9 + 25 + 25, np.float32))


def test_capture_inside_capture(hip_device: Any) -> None:
    with hip_device.capture(), pytest.raises(DeviceError, match="inside"), hip_device.capture():
        pass


def test_profile(hip_device: Any) -> None:
    hip_device.profile()
    x = hip_device.zeros((64,))
    for _ in range(3):
        hip_device.scale(x, 2.0)
    table = hip_device.profile_table()
    hip_device.profile(False)
    line = next(line for line in table.splitlines() if line.startswith("elementwise"))
    assert line.split()[1] == "3"
    assert hip_device.profile_table() == ""


def test_int64_is_refused(hip_device: Any) -> None:
    with pytest.raises(ValueError, match="int64.*int32"):
        hip_device.upload(np.zeros(3, np.int64))


def run_without_card(code: str, **environment: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return done.stdout


def test_no_driver_is_said(emulator: Any) -> None:
    pytest.importorskip("rocm.bindings", reason="hip-python is not installed")
    code = "from wgrad.hip import binding\ntry: binding.hip()\nexcept RuntimeError as e: print(e)"
    text = run_without_card(f"import sys; sys.path[:0] = {sys.path!r}\n{code}")
    assert "libamdhip64.so" in text and "hip-python is installed" in text


def test_no_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "_bindings", {})
    monkeypatch.setattr(binding, "_PACKAGES", ("there_is_no_such_package",))
    with pytest.raises(DeviceError, match="hip-python is not installed: pip install hip-python"):
        binding.hip()


def test_no_card_is_said(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "_bindings", {})
    monkeypatch.setenv("WGRAD_EMULATED_DEVICES", "0")
    with pytest.raises(DeviceError, match="finds no card"):
        binding.hip()
