"""The HIP runtime: errors that say what to do, the pool, replay as a graph, the profile."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wgrad.device.errors import DeviceError, DeviceLost, OutOfMemory
from wgrad.hip.runtime import binding
from wgrad.hip.runtime.architectures import check_image, check_supported
from wgrad.hip.runtime.binding import check
from wgrad.hip.runtime.objects import compress
from wgrad.hip.runtime.runtime import Long


def test_the_card_is_named(hip_device: Any) -> None:
    assert hip_device.architecture in hip_device.description
    assert hip_device.wave == (64 if hip_device.architecture == "gfx942" else 32)


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


def test_a_code_object_lives_as_long_as_its_module(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver keeps the pointer that hipModuleLoadData gets."""

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


def test_array_of_another_device(emulator: Any) -> None:
    one, other = emulator.new("gfx942"), emulator.new("gfx942")
    with pytest.raises(DeviceError, match="upload it to this device"):
        one.add(one.zeros((64,)), other.zeros((64,)))
    with pytest.raises(DeviceError, match="upload it to this device"):
        one.download(np.zeros(3))


def test_code_object_that_the_driver_refuses(emulator: Any) -> None:
    device = emulator.new("gfx942")
    emulator.build("storage", "gfx1100")
    device.modules.architecture = "gfx1100"
    with pytest.raises(DeviceError, match="storage.co cannot be loaded on Emulated gfx942.*wgrad.hip.runtime.build"):
        device.zeros((3,))


def elf(machine: int, flags: int = 0, sections: int = 0) -> bytes:
    """The header of a 64-bit ELF file with `sections` section headers behind it."""
    head = bytearray(64)
    head[:4] = b"\x7fELF"
    for at, size, value in ((18, 2, machine), (40, 8, 64), (48, 4, flags), (58, 2, 64), (60, 2, sections)):
        head[at : at + size] = value.to_bytes(size, "little")
    return bytes(head)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (elf(224, 0x41), "is for gfx1100, and this card is Emulated gfx942 \\(gfx942\\)"),
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
    """Files as the package has them: <file>.co.xz. The errors name the file."""
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
def test_supported_architectures(architecture: str) -> None:
    check_supported(architecture, "a card")


@pytest.mark.parametrize("architecture", ["gfx803", "gfx906", "gfx908", "gfx1030", "gfx1300", "gfx9421", "sm_90", ""])
def test_unsupported_architectures(architecture: str) -> None:
    with pytest.raises(DeviceError, match="a card has architecture .*not supported.*--device wgpu"):
        check_supported(architecture, "a card")


def test_missing_code_object(emulator: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = emulator.new("gfx942")
    monkeypatch.setenv("WGRAD_HIP_OBJECTS", str(tmp_path))
    with pytest.raises(DeviceError, match=r"gfx942/storage.co"):
        device.zeros((3,))


def test_full_card(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_capture_inside_capture(hip_device: Any) -> None:
    with hip_device.capture(), pytest.raises(DeviceError, match="inside"), hip_device.capture():
        pass


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_download_later_keeps_what_was_there(hip_device: Any, monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    """It does not wait, and what comes after does not change it; as on the wgpu device."""
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


def test_download_later_of_a_lost_device(hip_device: Any, blocking: None) -> None:
    x = hip_device.zeros((41,))
    later = hip_device.readback(x)
    with pytest.raises(DeviceLost):
        hip_device.launch("storage", "fill", [x, 0, Long(x.nbytes + 64)], (1, 1, 1))
    with pytest.raises(DeviceLost, match="copying Array.*the device is lost"):
        later.result()
    with pytest.raises(DeviceLost):
        hip_device.zeros((41,))


@pytest.mark.parametrize("grid", [(1 << 24, 1, 1), (1, 65_536, 1), (1, 1, 65_536)])
def test_launches_beyond_the_limits_are_refused(hip_device: Any, grid: tuple[int, int, int]) -> None:
    with pytest.raises(DeviceError, match=r"fill: a launch of .* exceeds.*smaller batch"):
        hip_device.launch("storage", "fill", [None, 0, Long(0)], grid)


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


def test_profile(hip_device: Any) -> None:
    hip_device.profile()
    x = hip_device.zeros((64,))
    for _ in range(3):
        hip_device.scale(x, 2.0)
    table = hip_device.profile_table()
    hip_device.profile(False)
    line = next(line for line in table.splitlines() if line.startswith("elementwise"))
    assert line.split()[1] == "3"
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


def test_no_card_is_said(emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "_bindings", {})
    monkeypatch.setenv("WGRAD_EMULATED_DEVICES", "0")
    with pytest.raises(DeviceError, match="finds no card"):
        binding.hip()
