"""The choice of a device: `auto` steps down with its reasons, a name never does."""

from __future__ import annotations

import importlib
import types
from typing import Any

import numpy as np
import pytest

from wgrad.autograd import select_device as dispatch
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest import probe as self_check
from wgrad.device.errors import DeviceError, DeviceLost, DeviceUnavailable, ShapeError
from wgrad.hip.runtime import binding
from wgrad.hip.runtime.gpus import Gpu

AMD = {"name": "Radeon", "vendor_id": 0x1002, "backend": "Vulkan", "type": "DiscreteGPU", "driver": "Mesa"}
INTEL = {"name": "Intel UHD", "backend": "Vulkan", "type": "IntegratedGPU", "driver": "Mesa", "features": []}
LLVMPIPE = {"name": "llvmpipe", "backend": "Vulkan", "type": "CPU", "driver": "Mesa", "features": ["shader-f16"]}


class FakeWgpu(ReferenceDevice):
    name = "wgpu"
    matrix_units = float16 = False
    broken: tuple[str | None, ...] = ()
    losses = 0  # attempts in which the GPU is lost

    def __init__(self, spec: str | None = None) -> None:
        super().__init__()
        self.spec = spec
        if type(self).losses:
            type(self).losses -= 1
            raise DeviceLost("adapter 0 gave no device: Parent device is lost")
        if spec in self.broken:
            raise DeviceError(f"adapter {spec} has no limits")


ONE_GPU = (Gpu(0, "a card"),)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """machine(adapters, hip, broken, gpus): what the lower rooms find; an exception in place of a list is raised."""

    def make(adapters: Any, hip: Any = None, broken: tuple[str | None, ...] = (), gpus: Any = ONE_GPU) -> None:
        def list_adapters(again: bool = False) -> list[dict[str, Any]]:
            if isinstance(adapters, Exception):
                raise adapters
            return [a if "crash" in a else {**a, "index": i} for i, a in enumerate(adapters)]

        wgpu_class = type("FakeWgpu", (FakeWgpu,), {"broken": broken})
        rooms = {"wgrad.wgsl.device": types.SimpleNamespace(WgpuDevice=wgpu_class, list_adapters=list_adapters)}
        real = importlib.import_module

        def import_module(name: str) -> Any:
            if name == "wgrad.hip.device":
                if hip is None:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
                return types.SimpleNamespace(HipDevice=hip, list_gpus=lambda: list(gpus))
            return rooms.get(name) or real(name)

        monkeypatch.setattr(dispatch.importlib, "import_module", import_module)

    return make


def test_this_machine_has_a_device_with_a_reason() -> None:
    device: Any = dispatch.select_device()
    assert device.name in ("cpu", "wgpu", "hip") and device.reason and device.description
    assert {d["spec"].partition(":")[0] for d in dispatch.list_devices()} == {"hip", "wgpu", "cpu"}


def test_auto_takes_a_gpu_before_a_software_driver(machine: Any) -> None:
    machine([LLVMPIPE, INTEL])
    device: Any = dispatch.select_device()
    assert (device.name, device.spec, device.reason) == ("wgpu", "1", "the first usable GPU")


def test_auto_takes_numpy_before_a_software_driver_and_says_why(machine: Any) -> None:
    machine([LLVMPIPE])
    device: Any = dispatch.select_device("auto")
    assert device.name == "cpu" and "llvmpipe is a software driver, which is slower than NumPy" in device.reason
    assert [listed["spec"] for listed in dispatch.list_devices()][1:] == ["cpu", "wgpu:0"]


def test_what_tests_kernels_takes_the_software_driver_and_says_so(machine: Any) -> None:
    machine([LLVMPIPE])
    device: Any = dispatch.select_device("auto", kernels=True)
    assert device.name == "wgpu" and "software Vulkan driver" in device.reason


def test_auto_passes_over_an_adapter_that_does_not_open(machine: Any) -> None:
    machine([INTEL, AMD], broken=("1",))
    device: Any = dispatch.select_device("auto")  # a GPU of its own comes first
    assert device.spec == "0" and "adapter 1 has no limits" in device.reason


@pytest.mark.parametrize("losses", [1, 2, 3])
def test_a_gpu_that_is_lost_as_it_opens_is_opened_again(
    machine: Any, monkeypatch: pytest.MonkeyPatch, losses: int
) -> None:
    pauses = list[float]()
    monkeypatch.setattr(dispatch.time, "sleep", pauses.append)
    monkeypatch.setattr(FakeWgpu, "losses", losses)
    machine([INTEL])
    if losses < 3:
        assert dispatch.select_device("wgpu").name == "wgpu"
    else:
        with pytest.raises(DeviceUnavailable, match="device wgpu: adapter 0 gave no device: Parent device is lost"):
            dispatch.select_device("wgpu")
    assert pauses == [0.5, 2.0][:losses]


def test_a_gpu_that_cannot_be_opened_is_tried_once(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.time, "sleep", lambda seconds: 1 // 0)
    machine([INTEL], broken=(None,))
    with pytest.raises(DeviceUnavailable, match="device wgpu: adapter None has no limits"):
        dispatch.select_device("wgpu")


CRASHING = {"name": "the Vulkan driver bad_icd.json", "crash": "crashed (SIGSEGV) while its adapters were listed"}


def test_what_crashes_is_named_and_not_used(machine: Any) -> None:
    machine([INTEL, CRASHING])
    device: Any = dispatch.select_device("auto")
    assert device.spec == "0" and "wgpu: the Vulkan driver bad_icd.json crashed (SIGSEGV) while" in device.reason
    (listed,) = (d for d in dispatch.list_devices() if "bad_icd" in d["name"])
    assert not listed["usable"] and "it crashed (SIGSEGV)" in listed["reason"]
    machine([CRASHING])
    device = dispatch.select_device("auto")
    assert device.name == "cpu" and "bad_icd.json crashed" in device.reason and "no adapter" not in device.reason


@pytest.mark.parametrize(
    "adapters, reason",
    [([], "no adapter; install a GPU driver"), (DeviceError("no Vulkan loader"), "no Vulkan loader"),
     (ModuleNotFoundError("No module named 'wgpu'", name="wgpu"), "pip install wgpu")],
)  # fmt: skip
def test_auto_ends_at_numpy_with_every_reason(machine: Any, adapters: Any, reason: str) -> None:
    machine(adapters)
    device: Any = dispatch.select_device("auto")
    assert device.name == "cpu" and reason in device.reason and "hip" not in device.reason.lower()


@pytest.mark.parametrize("adapters, kfd", [([AMD], False), ([INTEL], True), ([], True)])
def test_hip_is_a_subject_where_there_is_an_amd_gpu(
    machine: Any, adapters: Any, kfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its PCI vendor, or by the kernel's driver where Vulkan does not see it."""
    machine(adapters)
    monkeypatch.setattr(dispatch.os.path, "exists", lambda path: kfd and path == "/dev/kfd")
    device: Any = dispatch.select_device("auto")
    assert "hip: this version has no HIP kernels" in device.reason
    assert "no HIP kernels" in dispatch.list_devices()[0]["reason"]


def test_hip_is_no_subject_elsewhere(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine([INTEL])
    monkeypatch.setattr(dispatch.os.path, "exists", lambda path: False)
    device: Any = dispatch.select_device("auto")
    assert "hip" not in device.reason.lower()
    assert dispatch.list_devices()[0]["reason"] == "not usable: no AMD GPU was found"


class FakeHip(ReferenceDevice):
    name = "hip"

    def __init__(self, gpu: str | Gpu = "") -> None:
        super().__init__()
        if isinstance(gpu, Gpu):  # as listed: nothing is read again
            gpu = str(gpu.index)
        self.gpu, self.description = gpu, "a card (gfx942, HIP, shipped kernels)"
        if gpu == "7":
            raise DeviceError("a HIP stream: out of memory")


def test_auto_prefers_hip_where_its_self_check_passes(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine([INTEL], hip=FakeHip)
    monkeypatch.setattr(self_check, "verdict", lambda device: self_check.Verdict(True, ""))
    device: Any = dispatch.select_device("auto")
    assert device.name == "hip" and device.reason == "the HIP GPU; its self-check passed"


def test_auto_says_in_a_line_why_it_leaves_hip(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine([INTEL], hip=FakeHip)
    monkeypatch.setattr(self_check, "verdict", lambda device: self_check.Verdict(False, "y is off by 3"))
    device: Any = dispatch.select_device("auto")
    assert device.name == "wgpu" and "\n" not in device.reason
    assert "the self-check of a card (gfx942, HIP, shipped kernels) failed: y is off by 3" in device.reason
    by_name: Any = dispatch.select_device("hip")
    assert by_name.name == "hip" and by_name.reason == "asked for by name"


def test_auto_tries_every_hip_gpu(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of `list_gpus`; of each that it leaves it says why."""
    gpus = [Gpu(7, "broken"), Gpu(2, "wrong"), Gpu(1, "right"), Gpu(0, "old", problem="old has gfx1030; --device wgpu")]
    machine([INTEL], hip=FakeHip, gpus=gpus)
    monkeypatch.setattr(binding, "driver_version", lambda: "7.0")
    monkeypatch.setattr(self_check, "verdict", lambda device: self_check.Verdict(device.gpu == "1", "y is off by 3"))
    device: Any = dispatch.select_device("auto")
    assert (device.name, device.gpu) == ("hip", "1")
    assert "hip:7: a HIP stream: out of memory; hip:2: the self-check of" in device.reason
    assert [(d["spec"], d["usable"]) for d in dispatch.list_devices()[:4]] == [
        ("hip:7", True), ("hip:2", True), ("hip:1", True), ("hip:0", False)
    ]  # fmt: skip
    monkeypatch.setattr(self_check, "verdict", lambda device: self_check.Verdict(False, "y is off by 3"))
    device = dispatch.select_device("auto")
    assert device.name == "wgpu" and device.reason.endswith("; hip:0: old has gfx1030")
    device = dispatch.select_device("hip:RX 7900")
    assert device.gpu == "RX 7900"


@pytest.mark.parametrize("spec", ["wgpu", "wgpu:0", "hip"])
def test_a_name_never_falls_back(machine: Any, spec: str) -> None:
    machine([LLVMPIPE], broken=("0", None))
    with pytest.raises(DeviceUnavailable, match=f"device {spec.partition(':')[0]}"):
        dispatch.select_device(spec)


@pytest.mark.parametrize("spec", ["cuda", "", "cpu:1", "auto:0"])
def test_an_unknown_name_lists_the_known(spec: str) -> None:
    with pytest.raises(DeviceUnavailable, match="is not known; use one of: auto, hip, hip:"):
        dispatch.select_device(spec)


def test_a_named_adapter_is_passed_on(machine: Any) -> None:
    machine([INTEL])
    device: Any = dispatch.select_device("wgpu:Intel")
    assert device.spec == "Intel" and device.reason == "asked for by name"
    cpu: Any = dispatch.select_device("cpu")
    assert cpu.reason == "asked for by name"


def test_list_devices_names_all_with_reasons(machine: Any) -> None:
    machine([INTEL, LLVMPIPE])
    found = dispatch.list_devices()
    assert [d["spec"] for d in found] == ["hip", "wgpu:0", "cpu", "wgpu:1"]
    assert [d["usable"] for d in found] == [False, True, True, True]
    assert "not usable" in found[0]["reason"] and found[3]["features"] == ["shader-f16"]
    machine(DeviceError("no Vulkan loader"))
    assert [d["usable"] for d in dispatch.list_devices()] == [False, False, True]


# ---- what is called on a device itself -----------------------------------------------------
def _wrong_calls(device: Any) -> dict[str, Any]:
    def f32(*shape: int) -> Any:
        return device.upload(np.ones(shape, np.float32))

    i32 = device.upload(np.zeros(1, np.int32))
    flat, state, hyper = f32(9), f32(8), f32(4)
    betas = {"beta1": 0.9, "beta2": 0.99}
    return {
        "sample: uniform must be": lambda: device.sample(f32(2, 5), f32(1), f32(2, 4)),
        "sample: settings must be": lambda: device.sample(f32(5), f32(1), f32(4)),
        "grad_norm: g must be": lambda: device.grad_norm(f32(3, 3)),
        "clip: hyper must be": lambda: device.clip(f32(2), state, state, f32(1), **betas),
        "adamw: exp_avg must be": lambda: device.adamw(
            flat, flat, f32(8), flat, hyper, state, **betas, eps=1e-8, weight_decay=0.0, decay_elements=0
        ),
        "kv_append: new must be": lambda: device.kv_append(f32(1, 4, 2, 8), f32(1, 2, 3, 8), i32),
        "rope_append: keys must be": lambda: device.rope_append(
            f32(1, 2, 8), f32(1, 2, 8), f32(3, 4), f32(3, 4), i32, f32(1, 4, 3, 8), f32(1, 4, 3, 8), i32
        ),
        "quantize: block_size must be": lambda: device.quantize(f32(4, 4), 17),
        "dequantize: dtype must be": lambda: device.dequantize(device.quantize(f32(4, 4)), np.int32),
        "write: host must be": lambda: device.write(flat, np.zeros(10, np.float32)),
        "write: host must": lambda: device.write(flat, np.zeros(9, np.float64)),
        "copy: out must have": lambda: device.copy(flat, f32(8)),
    }


@pytest.mark.parametrize("spec", ["cpu", "wgpu"])
def test_operators_without_a_gradient_check_their_arguments(spec: str, wgpu_device: Any) -> None:
    """Nothing stands between a caller and these: a device of `select_device` checks them itself."""
    device: Any = dispatch.select_device("cpu") if spec == "cpu" else wgpu_device
    for message, call in _wrong_calls(device).items():
        with pytest.raises(ShapeError, match=message):
            call()


def test_a_checked_device_is_its_device() -> None:
    device = dispatch.select_device("cpu")
    assert isinstance(device, ReferenceDevice) and type(device).__name__ == "ReferenceDevice"
    assert dispatch.select_device("cpu").__class__ is type(device)
