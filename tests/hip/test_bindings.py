"""The door to hip-python with every version of it: 10 (`rocm.bindings`), and the older package `hip`.

$WGRAD_OLDER_HIP_PYTHON names a Python with an older hip-python (6.4 to 7.2), NumPy and ml_dtypes.
"""

from __future__ import annotations

import enum
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wgrad.device.errors import DeviceError, DeviceLost, OutOfMemory
from wgrad.hip.runtime import binding

OLDER = os.environ.get("WGRAD_OLDER_HIP_PYTHON")
USE = """
import sys; sys.path.append({source!r})
import numpy as np
from wgrad.hip.runtime import binding
from wgrad.hip.device import HipDevice
from wgrad.autograd.bind import bind
device = bind(HipDevice)()
x = np.arange(67, dtype=np.float32)
a, total = device.upload(x), device.zeros((67,))
with device.capture() as recorded:
    device.add(total, device.scale(a, 2.0), out=total)
recorded.run()
assert np.array_equal(device.download(total), 4 * x)
later = device.readback(total)
assert np.array_equal(later.result(), 4 * x) and later.ready()
device.profile()
device.scale(a, 2.0)
assert device.profile_table().count("elementwise") == 1
device.profile(False)
for wrong in ("nothing", "full"):
    try:
        device.launch("storage", wrong, [a], (1, 1, 1)) if wrong == "nothing" else device.empty((100 << 30,), np.uint8)
    except RuntimeError as error:
        print(type(error).__name__, error)
print(binding.hip().__name__, len(device.identity))
"""


@pytest.mark.parametrize("python", [sys.executable, OLDER], ids=["this", "older"])
def test_a_device_works_through_each_hip_python(emulator: Any, python: str | None) -> None:
    """Memory, launches, replay as a graph, events, pinned memory and error texts."""
    if python is None:
        pytest.skip("$WGRAD_OLDER_HIP_PYTHON is not set: it names a Python with hip-python 6.4 to 7.2")
    for source in ("storage", "elementwise"):
        emulator.build(source, "gfx942")
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment = {
        **kept,
        "LD_LIBRARY_PATH": str(emulator.folder),
        "WGRAD_HIP_OBJECTS": str(emulator.folder),
        "WGRAD_EMULATED_ARCH": "gfx942",
    }
    code = USE.format(source=str(Path(__file__).parents[2] / "src"))
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    missing, full, last = done.stdout.splitlines()
    said = "storage.hip has no kernel 'nothing' for gfx942: hipErrorNotFound (named symbol not found)"
    assert missing == f"DeviceError {said}"
    assert full.startswith("OutOfMemory") and "hipErrorOutOfMemory (out of memory)" in full
    assert last == ("rocm.bindings.hip 4" if python == sys.executable else "hip.hip 4")


class Code(enum.IntEnum):
    hipSuccess = 0
    hipErrorOutOfMemory = 2
    hipErrorIllegalAddress = 700
    hipErrorNotFound = 500


def stand_in(**functions: Any) -> Any:
    """A `hip` module of which only these functions are there."""
    return SimpleNamespace(hipGetDeviceCount=lambda: (Code.hipSuccess, 1), **functions)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda module: monkeypatch.setattr(binding, "_bindings", {"hip": module})


def test_properties_are_returned_or_filled_in(use: Any) -> None:
    def older(properties: Any, index: int) -> tuple[Code]:
        properties.gcnArchName = b"gfx1100"
        return (Code.hipSuccess,)

    use(stand_in(hipGetDeviceProperties=lambda index: (Code.hipSuccess, SimpleNamespace(gcnArchName="gfx942"))))
    assert binding.to_text(binding.device_properties(0).gcnArchName) == "gfx942"
    use(stand_in(hipGetDeviceProperties=older, hipDeviceProp_t=SimpleNamespace))
    assert binding.to_text(binding.device_properties(0).gcnArchName) == "gfx1100"


@pytest.mark.parametrize("text", ["too few", b"too few", (Code.hipSuccess, b"too few")], ids=["str", "bytes", "tuple"])
def test_error_texts_of_each_kind_are_shown(use: Any, text: Any) -> None:
    use(stand_in(hipGetErrorString=lambda code: text))
    with pytest.raises(OutOfMemory, match=r"an array: hipErrorOutOfMemory \(too few\)$"):
        binding.check((Code.hipErrorOutOfMemory,), "an array")
    with pytest.raises(DeviceLost, match=r"hipErrorIllegalAddress \(too few\)"):
        binding.check((Code.hipErrorIllegalAddress,), lambda: "a kernel")
    with pytest.raises(DeviceError, match="500 .too few."):  # a plain number instead of an enum
        binding.check((500,), "a kernel")


def test_fatal_codes_are_those_of_hip() -> None:
    hip = pytest.importorskip("rocm.bindings.hip", reason="hip-python is not installed")
    names = {code.value: code.name.removeprefix("hipError") for code in hip.hipError_t}
    assert {names.get(code) for code in binding._FATAL} == {
        "ECCNotCorrectable", "IllegalState", "IllegalAddress", "LaunchTimeOut", "Assert", "LaunchFailure", "Unknown"
    }  # fmt: skip


def test_check_returns_values_without_their_code() -> None:
    assert binding.check((Code.hipSuccess,), "") is None
    assert binding.check((0, 7), "") == 7
    assert binding.check((Code.hipSuccess, 7, 8), "") == (7, 8)
