"""The HIP runtime: errors that say what to do, the memory pool, replay as a graph, and profiles."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wgrad.autograd.selftest import activation, verify
from wgrad.autograd.selftest.case import F32
from wgrad.device.errors import DeviceError, DeviceHung, DeviceLost, OutOfMemory, TooLarge
from wgrad.hip.runtime import binding
from wgrad.hip.runtime.architectures import check_image, check_supported
from wgrad.hip.runtime.binding import NOT_READY, check
from wgrad.hip.runtime.gpus import find_gpu, list_gpus
from wgrad.hip.runtime.launch import Long
from wgrad.hip.runtime.objects import compress
from wgrad.hip.runtime.system import describe_system
from wgrad.train.commands import report_parts


def test_the_gpu_is_named(hip_device: Any) -> None:
    assert hip_device.architecture in hip_device.description
    assert hip_device.wave == (64 if hip_device.architecture == "gfx942" else 32)


def test_compute_units_of_rdna_are_counted_in_pairs(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated driver reports 4, which on RDNA are work-group processors, as with ROCm."""
    assert emulator.new("gfx942").compute_units == 4
    assert emulator.new("gfx1100").compute_units == emulator.new("gfx1201").compute_units == 8
    monkeypatch.setenv("GPU_ENABLE_WGP_MODE", "0")
    assert emulator.new("gfx1100").compute_units == 4


@pytest.mark.parametrize("wanted, index", [("", 2), ("1", 1), ("gfx1201", 3), ("emulated GFX11", 2)])
def test_of_several_gpus_one_is_chosen(emulator: Any, monkeypatch: pytest.MonkeyPatch, wanted: str, index: int) -> None:
    """This is the one that is named, or else the best, and not the integrated GPU that HIP lists first."""
    monkeypatch.setenv("WGRAD_EMULATED_ARCH", "gfx1036,gfx1103,gfx1100,gfx1201")
    device = emulator.new("gfx1036,gfx1103,gfx1100,gfx1201", gpu=wanted)
    assert device.index == index and device.shared_memory == (index == 1)
    made: list[Any] = []
    # HIP begins each thread at GPU 0.
    threads = [threading.Thread(target=lambda: made.extend([device.empty((3,)), device.empty_host((3,))]))]
    kernels: list[Any] = []
    if index > 1:  # they are built for it, and other GPUs refuse them
        threads.append(threading.Thread(target=lambda: kernels.append(device.modules.get("storage", "fill"))))
    for thread in threads:
        thread.start()
        thread.join()
    assert len(kernels) == (index > 1)
    assert [emulator.library.emulator_device_of(ctypes.c_void_p(a.address)) for a in made] == [index] * 2
    if index > 1:  # kernels are built for it
        np.testing.assert_array_equal(device.download(device.zeros((41,))), np.zeros(41))


def test_a_gpu_that_was_listed_is_not_read_again(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading properties asks the driver, which `auto` has done for all GPUs."""
    monkeypatch.setenv("WGRAD_EMULATED_ARCH", "gfx942,gfx1100")
    (other,) = [gpu for gpu in list_gpus() if gpu.architecture == "gfx1100"]
    monkeypatch.setattr(binding, "device_properties", lambda index: pytest.fail("read again"))
    assert emulator.new("gfx942,gfx1100", gpu=other).index == other.index == 1


def test_each_thread_makes_its_gpu_current(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """HIP starts every thread with GPU 0."""
    device = emulator.new("gfx942,gfx1100", gpu="1")
    x = device.zeros((41,))
    calls = count_calls(monkeypatch, device, "hipSetDevice")
    works = (
        lambda: device.readback(x).result(),
        lambda: device.empty((1 << 20,)),
        lambda: device.empty_host((1 << 20,)),
        device.free_memory,
        device.profile,
    )
    for number, work in enumerate(works, 1):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert calls["hipSetDevice"] == number
    device.profile(False)


def test_free_memory_is_the_drivers(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that share main memory have none of their own."""
    device = emulator.new("gfx942")
    monkeypatch.setattr(device._hip, "hipMemGetInfo", lambda: (0, 5 << 30, 9 << 30))
    assert device.free_memory() == 5 << 30
    device.shared_memory = True
    assert device.free_memory() is None


def test_a_gpu_that_is_not_there_or_not_supported_is_told(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WGRAD_EMULATED_ARCH", "gfx942,gfx1036")
    with pytest.raises(DeviceError, match="HIP has no GPU '5'; it has 0 Emulated gfx942, 1 Emulated gfx1036"):
        find_gpu("5")
    with pytest.raises(DeviceError, match="Emulated gfx1036 has architecture gfx1036, which is not supported"):
        find_gpu("1")
    monkeypatch.setenv("WGRAD_EMULATED_ARCH", "gfx803,gfx1103")
    assert find_gpu().index == 1  # of a processor, and the other is not supported
    read = binding.device_properties
    failing = lambda index: read(index) if index else check((719,), "properties of HIP device 0")  # noqa: E731
    monkeypatch.setattr(binding, "device_properties", failing)
    monkeypatch.setenv("WGRAD_EMULATED_ARCH", "gfx942,gfx942")
    assert find_gpu().index == 1 and "properties of HIP device 0" in list_gpus()[1].problem


def test_access_past_the_end_names_the_kernel(hip_device: Any, emulator: Any, blocking: None) -> None:
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


def test_arguments_below_zero_are_passed(hip_device: Any) -> None:
    x = hip_device.zeros((5,), np.int32)
    hip_device.launch("storage", "fill", [x, -1, Long(x.nbytes)], (1, 1, 1))
    np.testing.assert_array_equal(hip_device.download(x), np.full(5, -1))


def test_the_last_launch_is_named_where_a_copy_fails(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = emulator.new("gfx942")
    x = device.zeros((67,))
    with device.capture() as recorded:
        device.fill(x, 3.0)
    calls = count_calls(monkeypatch, device, "hipGraphInstantiateWithFlags", "hipGraphExecDestroy")
    recorded.run()  # makes the graph, launch by launch; later runs launch it as a whole
    device.scale(x, 2.0)
    for kernel in ("elementwise", "fill"):
        with monkeypatch.context() as patch, pytest.raises(DeviceError, match=f"last launch: kernel {kernel} on"):
            patch.setattr(device._hip, "hipMemcpyAsync", lambda *args: (1,))
            device.download(x)
        recorded.run()
    host = device.empty_host((67,))
    monkeypatch.setattr(device._hip, "hipMemcpyAsync", lambda *args: (1,))
    for way, arrays in (("to", (host, x)), ("from", (x, host))):
        with pytest.raises(DeviceError, match=f"a copy of 268 bytes {way} the GPU"):
            device.transfer(*arrays)
    del recorded
    gc.collect()
    assert calls == {"hipGraphInstantiateWithFlags": 1, "hipGraphExecDestroy": 1}


def test_a_device_prepares_and_plans_as_it_is_told(emulator: Any) -> None:
    """A kernel that does not load is left to its launch. Other compute units are for their block alone."""
    device = emulator.new("gfx942")
    told: list[tuple[int, int]] = []
    made: list[Any] = []
    dry = device.dry_run()
    dry.kernels.update({("storage", "nothing"): None, ("storage", "fill"): None})
    assert device.prepare(dry, lambda done, of: told.append((done, of))) == 1
    assert told == [(0, 2), (1, 2), (2, 2)]
    units = device.compute_units
    with pytest.raises(DeviceError, match="stop"), device.planned_for(units + 1):
        assert device.compute_units == units + 1
        raise DeviceError("stop")
    assert device.compute_units == units
    assert [device.once(made.append) for _ in range(2)] == [None, None] and made == [device]


def test_a_code_object_lives_as_long_as_its_module(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver keeps the pointer that is passed to hipModuleLoadData."""

    gone = []

    class Image(bytes):
        def __del__(self) -> None:
            gone.append(self[:4])

    device = emulator.new("gfx942")
    build_and_load = device.modules._image

    def image(source: str) -> tuple[bytes, str]:
        read, where = build_and_load(source)
        return Image(read), where

    monkeypatch.setattr(device.modules, "_image", image)
    device.zeros((3,))
    gc.collect()
    assert gone == []
    device.modules._modules.clear()
    assert gone == [b"\x7fELF"]


def test_an_array_of_another_device_is_refused(emulator: Any) -> None:
    one, other = emulator.new("gfx942"), emulator.new("gfx942")
    with pytest.raises(DeviceError, match="upload it to this device"):
        one.add(one.zeros((64,)), other.zeros((64,)))
    with pytest.raises(DeviceError, match="upload it to this device"):
        one.download(np.zeros(3))
    ours, theirs, host = one.zeros((64,)), other.zeros((64,)), one.empty_host((64,))
    for use in (
        lambda: one.transfer(theirs, host),
        lambda: one.transfer(host, theirs),
        lambda: one.transfer(ours, other.empty_host((64,))),
        lambda: one.write(theirs, np.zeros(64, np.float32)),
        lambda: one.readback(theirs),
    ):
        with pytest.raises(DeviceError, match="upload it to this device"):
            use()


def test_a_code_object_that_the_driver_refuses_is_named(emulator: Any) -> None:
    device = emulator.new("gfx942")
    emulator.build("storage", "gfx1100")
    device.modules.architecture = "gfx1100"
    with pytest.raises(DeviceError, match="storage.co cannot be loaded on Emulated gfx942.*wgrad.hip.runtime.build"):
        device.zeros((3,))


def elf(machine: int, flags: int = 0, sections: int = 0) -> bytes:
    """Return the header of a 64-bit ELF file, followed by `sections` section headers."""
    head = bytearray(64)
    head[:4] = b"\x7fELF"
    for at, size, value in ((18, 2, machine), (40, 8, 64), (48, 4, flags), (58, 2, 64), (60, 2, sections)):
        head[at : at + size] = value.to_bytes(size, "little")
    return bytes(head)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (elf(224, 0x41), "is for gfx1100, and this GPU is Emulated gfx942 \\(gfx942\\)"),
        (elf(224, 0x53F), "is for gfx90a, and"),  # with bits for xnack and sramecc
        (elf(224, 0xF1), "is for machine 0xf1, and"),
        (elf(224, 0x54C, 3), "is cut off at 64 bytes"),
        (elf(224, 0x54C)[:63], "is damaged \\(63 bytes, no ELF file\\)"),
        (b"\0" * 100, "is damaged \\(100 bytes, no ELF file\\)"),
    ],
)
def test_wrong_code_objects_never_reach_the_driver(
    emulator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: bytes, message: str
) -> None:
    """Test files like those of the package, <file>.co.xz. Errors name the file."""
    device = emulator.new("gfx942")
    monkeypatch.setenv("WGRAD_HIP_OBJECTS", str(tmp_path))
    monkeypatch.setattr(emulator, "folder", tmp_path / "elsewhere")  # where kernels are built
    monkeypatch.setattr(device._hip, "hipModuleLoadData", lambda image: pytest.fail("the driver got it"))
    (tmp_path / "gfx942").mkdir()
    path = tmp_path / "gfx942" / "storage.co.xz"
    path.write_bytes(compress(image))
    with pytest.raises(DeviceError, match=f"the code object {path} {message}.*wgrad.hip.runtime.build"):
        device.zeros((3,))
    path.write_bytes(compress(image)[:-9])
    with pytest.raises(DeviceError, match=f"{path} is damaged.*install wgrad again"):
        device.zeros((3,))


def test_its_own_code_object_passes() -> None:
    check_image(elf(224, 0x54C), "x.co", "gfx942", "a card")
    check_image(elf(224, 0x99), "x.co", "gfx1299", "a card newer than the table")


@pytest.mark.parametrize("architecture", ["gfx90a", "gfx942", "gfx950", "gfx1103", "gfx1151", "gfx1201"])
def test_supported_architectures_are_taken(architecture: str) -> None:
    check_supported(architecture, "a card")


OTHERS = ["gfx803", "gfx906", "gfx908", "gfx1030", "gfx1170", "gfx1250", "gfx1300", "gfx9421", "sm_90", ""]


@pytest.mark.parametrize("architecture", OTHERS)
def test_unsupported_architectures_are_refused(architecture: str) -> None:
    with pytest.raises(DeviceError, match="a card has architecture .*not supported.*--device wgpu"):
        check_supported(architecture, "a card")


def test_a_missing_code_object_is_named(emulator: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = emulator.new("gfx942")
    monkeypatch.setenv("WGRAD_HIP_OBJECTS", str(tmp_path))
    with pytest.raises(DeviceError, match=r"gfx942/storage.co"):
        device.zeros((3,))


def test_a_full_gpu_reports_the_bytes_asked_for(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = emulator.new("gfx942")
    monkeypatch.setenv("WGRAD_EMULATED_MEMORY", str(64 << 20))
    with pytest.raises(OutOfMemory, match="no memory for 104,857,600 bytes on .*in use"):
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


def count_calls(monkeypatch: pytest.MonkeyPatch, device: Any, *names: str) -> dict[str, int]:
    counts = dict.fromkeys(names, 0)

    def counted(name: str, call: Any, *args: Any) -> Any:
        counts[name] += 1
        return call(*args)

    for name in names:
        monkeypatch.setattr(device._hip, name, partial(counted, name, getattr(device._hip, name)))
    return counts


@pytest.mark.parametrize("failing", ["", "hipGraphInstantiateWithFlags", "hipGraphLaunch", "hipStreamBeginCapture"])
def test_without_graphs_a_replay_launches_one_by_one(
    emulator: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    """With WGRAD_HIP_GRAPHS=0, or once the driver's graphs have failed, the same launches run one by one."""
    if not failing:
        monkeypatch.setenv("WGRAD_HIP_GRAPHS", "0")
    device = emulator.new("gfx942")
    x, total = device.upload(np.full(67, 3, np.float32)), device.zeros((67,))
    with device.capture() as recorded:
        device.add(total, device.mul(x, x), out=total)
    if failing:
        monkeypatch.setattr(device._hip, failing, lambda *args: (801, None))
    calls = count_calls(monkeypatch, device, "hipStreamBeginCapture", "hipStreamEndCapture", "hipGraphDestroy")
    for _ in range(3):
        recorded.run()
    np.testing.assert_array_equal(device.download(total), np.full(67, 36, np.float32))  # one of them recorded
    assert calls["hipStreamBeginCapture"] == bool(failing)
    assert calls["hipGraphDestroy"] == calls["hipStreamEndCapture"]  # what is captured is freed
    notes = [record.getMessage() for record in caplog.records]
    assert len(notes) == bool(failing) and all("HIP graphs fail here" in note for note in notes)


@pytest.mark.parametrize("mode", ["1", "trace"])
def test_a_launch_that_fails_is_named(
    emulator: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    """With WGRAD_HIP_SYNC, the device waits for each launch, also in a replay. A trace lists its arguments first."""
    monkeypatch.setenv("WGRAD_HIP_SYNC", mode)
    device = emulator.new("gfx942")
    x = device.upload(np.full(67, 3, np.float32))
    with device.capture() as recorded:
        device.mul(x, x)
    calls = count_calls(monkeypatch, device, "hipStreamBeginCapture")
    waits = count_calls(monkeypatch, device, "hipModuleLaunchKernel")
    recorded.run()
    assert not calls["hipStreamBeginCapture"] and waits["hipModuleLaunchKernel"] == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("launch: kernel ")]
    assert bool(lines) == (mode == "trace")
    assert all(f"arguments {x.address}, {x.address}, " in line for line in lines)
    monkeypatch.setattr(device, "synchronize", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        device.mul(x, x)  # waited for


def test_the_details_of_a_report(emulator: Any) -> None:
    device = emulator.new("gfx1100")
    device.fill(device.empty((8,)), 1.0)
    found = device.details()
    assert found["kernels"]["origin"] in ("shipped", "hiprtc") and "storage" in found["kernels"]["loaded"]
    assert found["kernels"]["refused"] == {}
    assert found["hip"]["driver"] and found["hip"]["package"] and len(found["kernels"]["digest"]) == 64


def test_the_system_around_a_gpu_is_described(tmp_path: Path) -> None:
    texts = {
        "opt/rocm/.info/version": "6.4.1-83",
        "sys/module/amdgpu/version": "6.12.12",
        "sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 16\nsimd_count 0",
        "sys/class/kfd/kfd/topology/nodes/1/properties": "simd_count 192\ngfx_target_version 110000\nlds_size_in_kb 64",
        "sys/class/drm/card1/device/fw_version/mec_fw_version": "0x00000211",
        "sys/class/drm/card1/device/pp_dpm_sclk": "0: 500Mhz\n1: 2304Mhz *",
        "sys/class/drm/card1-DP-1/device/fw_version/mec_fw_version": "0x1",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert describe_system(tmp_path) == {
        "rocm": "6.4.1-83",
        "amdgpu": "6.12.12",
        "gpus": [{"gfx_target_version": 110000, "simd_count": 192, "lds_size_in_kb": 64}],
        "cards": [{"firmware": {"mec": "0x00000211"}, "clocks": {"pp_dpm_sclk": "2304Mhz"}}],
    }
    assert describe_system(tmp_path / "none") == {}


def test_a_lost_device_is_no_reason_to_replay_without_graphs(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = emulator.new("gfx942")
    x = device.zeros((67,))
    with device.capture() as recorded:
        device.add(x, x, out=x)
    monkeypatch.setattr(device._hip, "hipGraphLaunch", lambda *args: (719,))
    with pytest.raises(DeviceLost, match="replay of 1 launches"):
        recorded.run()


def test_waits_of_older_packages_let_other_threads_run(hip_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They poll the driver, because hip-python before 10 holds the GIL while it waits."""
    monkeypatch.setenv("WGRAD_EMULATED_SEED", "1")
    monkeypatch.setattr(hip_device._hip, "__name__", "hip.hip")
    calls = count_calls(
        monkeypatch, hip_device,
        "hipStreamSynchronize", "hipEventSynchronize", "hipDeviceSynchronize", "hipStreamQuery", "hipEventQuery",
    )  # fmt: skip
    x = hip_device.upload(np.full(67, 3, np.float32))
    later = hip_device.readback(hip_device.scale(x, 2.0))
    np.testing.assert_array_equal(later.result(), np.full(67, 6, np.float32))
    np.testing.assert_array_equal(hip_device.download(hip_device.scale(x, 3.0)), np.full(67, 9, np.float32))
    hip_device.profile()
    hip_device.scale(x, 2.0)
    assert "elementwise" in hip_device.profile_table()
    hip_device.profile(False)
    del later
    waits = [name for name in calls if name.endswith("Synchronize")]
    assert [calls[name] for name in waits] == [0] * 3 and calls["hipStreamQuery"] and calls["hipEventQuery"]
    monkeypatch.setattr(hip_device._hip, "hipStreamQuery", lambda stream: (719,))
    with pytest.raises(DeviceLost):
        hip_device.synchronize()


@pytest.mark.parametrize("package", ["hip.hip", "rocm.bindings.hip"])
def test_a_wait_for_a_device_that_hangs_ends(package: str, hip_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WGRAD_DEVICE_TIMEOUT", "0.05")
    monkeypatch.setattr(hip_device._hip, "__name__", package)
    gate = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(hip_device._hip, "hipStreamQuery", lambda stream: (NOT_READY,))
        patch.setattr(hip_device._hip, "hipStreamSynchronize", lambda stream: (int(not gate.wait()),))
        with pytest.raises(DeviceHung, match=r"^the device hangs: work on .* was not done in 0 s\. If it is only slow"):
            hip_device.synchronize()
    gate.set()
    hip_device.synchronize()


def test_a_capture_inside_a_capture_is_refused(hip_device: Any) -> None:
    with hip_device.capture(), pytest.raises(DeviceError, match="inside"), hip_device.capture():
        pass


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_download_later_keeps_what_was_there(hip_device: Any, monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    """It does not wait, and later work does not change it; as on the wgpu device."""
    x = hip_device.upload(np.full(67, 3, dtype))
    with monkeypatch.context() as patch:
        patch.setattr(hip_device, "synchronize", lambda: pytest.fail("it waits"))
        first = hip_device.readback(x)
        hip_device.write(x, np.full(67, 5, dtype))
        second = hip_device.readback(x)
        monkeypatch.setenv("WGRAD_EMULATED_SEED", "late")
        assert not hip_device.readback(x).ready()
        monkeypatch.undo()
        while not second.ready():
            pass
        np.testing.assert_array_equal(second.result(), np.full(67, 5, dtype))
        np.testing.assert_array_equal(first.result(), np.full(67, 3, dtype))
    assert first.ready()
    with pytest.raises(DeviceError, match="called twice"):
        first.result()


def test_pinned_memory_is_used_again(hip_device: Any) -> None:
    x = hip_device.zeros((133, 67))
    hip_device.readback(x).result()
    addresses = {pinned.address for pinned in hip_device._readbacks._free}
    later = hip_device.readback(x)
    assert later._pinned.address in addresses
    assert later.result().shape == (133, 67) and len(hip_device._readbacks._free) == len(addresses)
    assert hip_device.readback(hip_device.empty((0, 7))).result().shape == (0, 7)
    del later  # one that nobody asks for is no error
    hip_device.readback(x)


def test_most_pinned_memory_is_given_back(hip_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight buffers are kept, and none serves far smaller arrays."""
    x = hip_device.zeros((133, 67))
    under_way = [hip_device.readback(x) for _ in range(9)]
    calls = count_calls(monkeypatch, hip_device, "hipHostFree", "hipEventDestroy")
    for readback in under_way:
        readback.result()
    del readback, under_way
    gc.collect()
    assert len(hip_device._readbacks._free) == 8 and calls["hipHostFree"] == calls["hipEventDestroy"] >= 1
    assert hip_device.readback(hip_device.zeros((3,)))._pinned.nbytes < x.nbytes


def test_a_readback_of_a_lost_device_says_so(hip_device: Any, blocking: None) -> None:
    x = hip_device.zeros((41,))
    later = hip_device.readback(x)
    with pytest.raises(DeviceLost):
        hip_device.launch("storage", "fill", [x, 0, Long(x.nbytes + 64)], (1, 1, 1))
    for ask in (later.ready, later.result):
        with pytest.raises(DeviceLost, match="copying Array.*the GPU is lost"):
            ask()
    with pytest.raises(DeviceLost):
        hip_device.zeros((41,))


@pytest.mark.parametrize("grid", [(1 << 24, 1, 1), (1, 65_536, 1), (1, 1, 65_536)])
def test_launches_beyond_the_limits_are_refused(hip_device: Any, grid: tuple[int, int, int]) -> None:
    for device in (hip_device, hip_device.dry_run()):
        with pytest.raises(TooLarge, match=r"fill: a launch of .* exceeds.*smaller batch"):
            device.launch("storage", "fill", [None, 0, Long(0)], grid)


def test_trim_gives_back_what_is_free(hip_device: Any) -> None:
    hip_device.trim()
    x = hip_device.zeros((1003,))
    kept = hip_device.memory().reserved_bytes
    hip_device.zeros((2003,))
    assert hip_device.trim() == 8016 and hip_device.memory().reserved_bytes == kept
    np.testing.assert_array_equal(hip_device.download(x), np.zeros(1003))


def test_identity_hangs_on_the_kernels(emulator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = emulator.new("gfx942")
    monkeypatch.setenv("WGRAD_HIP_OBJECTS", str(tmp_path))
    (tmp_path / "gfx942").mkdir()
    (tmp_path / "gfx942" / "storage.co").write_bytes(b"one")
    card, architecture, driver, digest = device.identity
    assert (card, architecture) == ("Emulated gfx942", "gfx942") and int(driver) > 0
    (tmp_path / "gfx942" / "storage.co").write_bytes(b"two")
    assert device.identity[3] != digest


def test_profile_counts_calls_and_starts_anew(hip_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wgrad.hip.runtime.profiler.BATCH", 2)  # launches that have events at a time
    monkeypatch.setattr(hip_device._hip, "hipEventElapsedTime", lambda start, end: (0, 2.5))  # ms
    made = count_calls(monkeypatch, hip_device, "hipEventCreate")
    x = hip_device.zeros((64,))
    with hip_device.capture() as recorded:
        hip_device.scale(x, 2.0)
    hip_device.profile()
    hip_device.fill(x, 1.0)
    hip_device.scale(x, 2.0)
    for _ in range(2):
        recorded.run()  # launch by launch, as a graph has no events within
    table = hip_device.profile_table()
    hip_device.profile(False)
    line = next(line for line in table.splitlines() if line.startswith("elementwise"))
    assert line.split()[1:4] == ["3", "7.500", "2500.00"] and made["hipEventCreate"] == 4
    assert table.splitlines()[0].split() == "kernel calls total ms mean us share".split()  # as on the wgpu device
    assert hip_device.profile_table() == ""


def test_int64_is_refused(hip_device: Any) -> None:
    with pytest.raises(ValueError, match="int64.*int32"):
        hip_device.upload(np.zeros(3, np.int64))


def run_without_card(code: str, **environment: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return done.stdout


def test_no_driver_is_said(emulator: Any) -> None:
    pytest.importorskip("rocm.bindings", reason="hip-python is not installed")
    code = "from wgrad.hip.runtime import binding\ntry: binding.hip()\nexcept RuntimeError as e: print(e)"
    text = run_without_card(f"import sys; sys.path[:0] = {sys.path!r}\n{code}")
    assert "libamdhip64.so" in text and "hip-python is installed" in text


def test_no_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "_bindings", {})
    monkeypatch.setattr(binding, "_PACKAGES", ("there_is_no_such_package",))
    with pytest.raises(DeviceError, match="hip-python is not installed: pip install hip-python"):
        binding.hip()


def test_no_gpu_is_said(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "_bindings", {})
    monkeypatch.setenv("WGRAD_EMULATED_DEVICES", "0")
    with pytest.raises(DeviceError, match="finds no GPU"):
        binding.hip()


def test_a_run_on_hip_is_verified(emulator: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernels that its dry run launches are checked. The parts of a report run, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("WGRAD_VERIFY", raising=False)
    for module in (verify, report_parts):
        monkeypatch.setattr(module, "selftest_cases", lambda device: activation.cases(F32)[:4])
    device = emulator.new("gfx1100")
    monkeypatch.setattr(type(device), "identity", ("a card",))  # the emulator builds objects while it runs
    dry = device.dry_run()
    dry.silu(dry.empty((33, 128)))
    assert verify.verify(device, dry).operators == 1
    assert verify.verify(device, dry).operators == 0
    lines = [*report_parts.describe_device(device), *report_parts.self_test(device)]
    rows = [line["add"][1] for line in lines if line.get("add", [""])[0] == "cases"]
    assert len(rows) == 4 and not any("failed" in row for row in rows)
    assert "activation" in lines[-1]["set"]["details"]["kernels"]["loaded"]
