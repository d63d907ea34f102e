"""Errors of drivers and wgpu: each becomes one line of our own, above all a lost device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from wgrad.autograd.bind import bind
from wgrad.device.contract import Device
from wgrad.device.errors import DeviceError, DeviceLost, OutOfMemory
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.runtime import native
from wgrad.wgsl.runtime.submission_queue import UPLOAD_BYTES


@pytest.mark.parametrize(
    "text,kind",
    [
        ("Validation Error\n\nCaused by:\n  Parent device is lost", DeviceLost),
        ("The WGPU device was lost (unknown):\nreset", DeviceLost),
        ("Out of Memory", OutOfMemory),
        ("Buffer usage mismatch", DeviceError),
    ],
)
def test_messages_become_one_line_of_the_right_class(text: str, kind: type[DeviceError]) -> None:
    error = native.as_device_error(text, "testing")
    assert type(error) is kind
    assert "\n" not in str(error) and "testing" in str(error)


def test_what_can_only_be_logged_is_raised() -> None:
    log = native.error_log()
    log.messages.append("The WGPU device was lost (destroyed): gone")
    with pytest.raises(DeviceLost, match="The driver reset it"):
        log.raise_if_any("waiting")
    log.raise_if_any("waiting")  # once


@pytest.mark.parametrize(
    "after", ["launch", "allocate", "download", "readback", "write", "large", "next large", "replay"]
)
def test_a_destroyed_device_is_reported_as_lost(after: str, wgpu_device: Device) -> None:
    """A real one, destroyed under our hands: whatever comes next says that it was lost."""
    device = bind(WgpuDevice)()
    array = device.upload(np.ones(100, np.float32))
    large = np.zeros(7 * UPLOAD_BYTES, np.uint8)
    target = device.upload(large) if after == "next large" else device.empty(large.shape, np.uint8)
    with device.capture() as replay:
        device.add(array, array, out=device.empty(array.shape))
    device.synchronize()
    device._device.destroy()

    def launch() -> None:
        device.fill(array, 2.0)
        device.synchronize()

    def again() -> None:
        replay.run()
        device.synchronize()

    calls: dict[str, Callable[[], object]] = {
        "launch": launch,
        "allocate": lambda: device.empty((5000,)),
        "download": lambda: device.download(array),
        "readback": lambda: device.readback(array).result(),
        "write": lambda: device.write(array, np.zeros(100, np.float32)),
        "large": lambda: device.write(target, large),
        "next large": lambda: device.write(target, large),
        "replay": again,
    }
    with pytest.raises(DeviceLost, match="lost while"):
        calls[after]()


@pytest.mark.parametrize("text", ["WGPUBufferDescriptor *", "WGPUBindGroupEntry[]", "WGPUAdapter[]", "WGPULimits * "])
def test_types_are_those_that_cffi_parses(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And are not parsed: that takes as long as opening a device."""
    ffi = native.ffi
    with ffi._lock:
        parsed = ffi._get_cached_btype(ffi._parser.parse_type(text))
    monkeypatch.setattr(ffi, "_parsed_types", native._Types())
    monkeypatch.setattr(ffi._parser, "parse_type", None)
    assert ffi.typeof(text) is parsed


def test_other_texts_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    ffi = native.ffi
    monkeypatch.setattr(ffi, "_parsed_types", native._Types())
    assert ffi.typeof("char[5]").length == 5 and ffi.typeof("WGPULimits const *").kind == "pointer"
    with pytest.raises(Exception, match="NoSuchType"):
        ffi.typeof("NoSuchType *")


def test_a_library_that_is_none_is_one_line(tmp_path: Path) -> None:
    """In a process of its own: wgpu finds its library while it is imported."""
    file = tmp_path / "library.so"
    file.write_text("not one")
    code = (
        "from wgrad.device.errors import DeviceError\n"
        "try:\n    import wgrad.wgsl.runtime.native\nexcept DeviceError as error:\n    print(error)"
    )
    environment = {**os.environ, "WGPU_LIB_PATH": str(file)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert ran.stderr == "" and ran.stdout.startswith(f"WGPU_LIB_PATH: '{file}' cannot be loaded as wgpu's library (")
    assert ran.stdout.count("\n") == 1 and ran.stdout.endswith("): correct or unset it\n")
    assert "Additionally" not in ran.stdout
