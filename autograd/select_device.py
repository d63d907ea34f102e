"""Select the device of a run, with the reason.

`auto` takes the first of: the best HIP GPU that passes a short self-check, a real GPU through wgpu, NumPy. A software
Vulkan driver is taken only by name, or to plan and test kernels: it also computes on the CPU, but more slowly than
NumPy (bench/notes/cpu.md).
A device that is requested by name but cannot be used is an error; there is no silent fallback.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from typing import Any

from wgrad.autograd import matrix_units
from wgrad.autograd.bind import bind
from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest import probe as self_check
from wgrad.autograd.selftest.verify import turn_off_what_failed
from wgrad.device.contract import Device
from wgrad.device.errors import DeviceError, DeviceLost, DeviceUnavailable, NoGpu, OperatorMissing
from wgrad.device.shown import short

_PAUSES = (0.5, 2.0)  # seconds before a GPU that was lost while it was opened is opened again
_LONGEST = 500  # characters of a name; drivers' names are shorter
SPECS = "auto, hip, hip:<index or part of a name>, wgpu, wgpu:<index or part of a name>, cpu"
_KINDS = {"auto": False, "hip": True, "wgpu": True, "cpu": False}  # whether an index or part of a name may follow
SOFTWARE = "CPU"  # the adapter type of a software Vulkan driver
AMD = 0x1002  # PCI vendor id
Needs = Callable[[Device], None]  # raises OperatorMissing
_OF_EXPRESSIONS = frozenset({"fused"})  # operators that expressions of Tensors need
_PASSED = "the HIP GPU; its self-check passed"
_AMD_DRIVER = "/dev/kfd"  # HIP opens it on Linux; it exists if the kernel's driver has found a GPU


def check_spec(spec: str) -> tuple[str, str]:
    """Return the kind of device that a spec names, and the index or part of a name after it.

    Raises:
        DeviceUnavailable: The spec is unknown. Whether there is such a device is not looked at.
    """
    kind, _, rest = spec.strip().partition(":")
    if len(spec) > _LONGEST or kind not in _KINDS or (rest and not _KINDS[kind]):
        raise DeviceUnavailable(f"device {short(spec)} is not known; use one of: {SPECS}")
    return kind, rest


def select_device(spec: str = "auto", needs: Needs | None = None, *, kernels: bool = False) -> Device:
    """Open a device by name.

    Args:
        spec: auto | hip | wgpu | cpu; hip and wgpu also with :<index or part of the GPU's name>.
        needs: Calls the operators that will be needed, on a dry run of a device, and raises OperatorMissing. It is only
            called for devices that declare to lack operators; `auto` then moves on to the next device.
        kernels: Whether `auto` prefers a software driver to NumPy, which has no kernels to plan or test.

    Returns:
        A newly opened device. Its `reason` is a phrase that says why it was chosen.

    Raises:
        DeviceUnavailable: The spec is unknown, or names a device that cannot be used here or lacks a needed operator.
    """
    kind, rest = check_spec(spec)
    makers: dict[str, Callable[[], Device]] = {
        "auto": lambda: _auto(needs, kernels),
        "hip": lambda: _hip(rest, f"hip:{rest}" if rest else "hip"),
        "cpu": lambda: _reference("asked for by name"),
        "wgpu": lambda: _wgpu(rest or None, "asked for by name"),
    }
    device = makers[kind]()
    try:
        _check_operators(device, needs)
    except OperatorMissing as error:
        raise DeviceUnavailable(f"{error}, which this run needs: use another --device, or auto") from error
    return device


def _check_operators(device: Any, needs: Needs | None) -> None:
    """Raise OperatorMissing if the device lacks a needed operator."""
    if needs is not None and device.lacks:
        needs(device)


def expressions(device: Device) -> None:
    """Check that a device can compute expressions of Tensors, as `needs` of `select_device`."""
    for name in sorted(_OF_EXPRESSIONS & device.lacks):
        raise OperatorMissing(device.name, name)


def _auto(needs: Needs | None, kernels: bool) -> Device:
    """Return the best device that works; its reason says why those before it did not."""
    refused: list[str] = []
    try:
        adapters, crashes = _list_adapters()
        no_wgpu = ""
    except DeviceUnavailable as error:
        adapters, crashes, no_wgpu = [], [], _short(error)
    if (device := _best_hip(adapters, needs, refused)) is not None:
        return device
    refused += [f"wgpu: {crash['name']} {crash['crash']}" for crash in crashes]
    software = [adapter for adapter in adapters if adapter["type"] == SOFTWARE]
    cards = sorted((a for a in adapters if a not in software), key=lambda a: a["type"] != "DiscreteGPU")
    if (device := _best_adapter([*cards, *(software if kernels else [])], needs, refused)) is not None:
        return device
    if no_wgpu:
        refused.append(no_wgpu)
    elif not adapters and not crashes:
        refused.append("wgpu: no adapter; install a GPU driver")
    if software and not kernels:
        refused.append(f"{software[0]['name']} is a software driver, which is slower than NumPy")
    return _reference(f"no GPU works here: {'; '.join(refused)}")


def _best_hip(adapters: list[dict[str, Any]], needs: Needs | None, refused: list[str]) -> Device | None:
    """Return the first HIP GPU that passes the self-check, or None. refused: receives a reason for each other one."""
    try:
        gpus = _list_hip()
    except DeviceUnavailable as error:
        gpus = []
        if _concerns_amd(error, adapters):
            refused.append(_short(error).partition(";")[0])
    for gpu in gpus:
        spec = f"hip:{gpu.index}"
        if gpu.problem:
            refused.append(f"{spec}: {gpu.problem.partition(';')[0]}")
            continue
        try:
            device = _hip(gpu, spec)
            checked = self_check.verdict(device)
            if checked.passed:
                _check_operators(device, needs)
                device.reason = "; ".join([_PASSED, *refused])
                return device
            refused.append(f"{spec}: the self-check of {device.description} failed: {checked.reason}")
        except OperatorMissing as error:
            refused.append(_without(spec, error))
        except DeviceUnavailable as error:
            refused.append(_short(error).partition(";")[0])
    return None


def _best_adapter(adapters: list[dict[str, Any]], needs: Needs | None, refused: list[str]) -> Device | None:
    """Return the first wgpu adapter that works, or None. refused: receives a reason for each other one."""
    for adapter in adapters:
        is_software = adapter["type"] == SOFTWARE
        reason = "no GPU was found; this is a software Vulkan driver" if is_software else "the first usable GPU"
        try:
            device = _wgpu(str(adapter["index"]), "; ".join([reason, *refused]))
            _check_operators(device, needs)
            return device
        except OperatorMissing as error:
            refused.append(_without(f"wgpu:{adapter['index']}", error))
        except DeviceUnavailable as error:
            refused.append(_short(error))
    return None


def _without(spec: str, error: OperatorMissing) -> str:
    return f"{spec}: it has no operator {error.operator}, which this run needs"


def _concerns_amd(error: DeviceUnavailable, adapters: list[dict[str, Any]]) -> bool:
    """Return whether there is an AMD GPU that HIP might run on; else its error does not matter."""
    if any(adapter.get("vendor_id") == AMD for adapter in adapters) or os.path.exists(_AMD_DRIVER):
        return True
    cause = error.__cause__
    return isinstance(cause, DeviceError) and not isinstance(cause, NoGpu)  # HIP itself has found a GPU


def _short(error: DeviceUnavailable) -> str:
    return str(error).removeprefix("device ")


def _unusable(error: DeviceUnavailable) -> str:
    return f"not usable: {str(error).partition(': ')[2]}"


def gpu_elsewhere(reason: str) -> Device:
    """Return a GPU to plan for on a machine without one; nothing can run on it."""
    device: Device = bind(importlib.import_module("wgrad.wgsl.planned_gpu").PlannedGpu)()
    device.reason = reason
    return device


def _reference(reason: str) -> Device:
    device = ReferenceDevice()
    device.reason = reason
    return device


def _hip_room() -> Any:
    try:
        return importlib.import_module("wgrad.hip.device")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("wgrad.hip"):
            raise DeviceUnavailable(f"device hip: {error}; pip install hip-python") from error
        raise DeviceUnavailable("device hip: this version has no HIP kernels; wgpu runs on AMD GPUs too") from None


def _list_hip() -> list[Any]:
    """Return the GPUs of HIP, best first (hip/runtime/gpus.py). DeviceUnavailable: they cannot be listed."""
    room = _hip_room()
    try:
        return list(room.list_gpus())
    except DeviceError as error:
        raise DeviceUnavailable(f"device hip: {error}") from error


def _hip(gpu: Any, spec: str) -> Device:
    """Open a HIP device. gpu: its name, or one of `_list_hip`. DeviceUnavailable: it cannot be opened."""
    room = _hip_room()
    try:
        device: Device = bind(room.HipDevice)(gpu)
    except DeviceError as error:
        raise DeviceUnavailable(f"device {spec}: {error}") from error
    device.reason = "asked for by name"
    return device


def _wgpu(adapter: str | None, reason: str) -> Device:
    """Open a wgpu device. DeviceUnavailable: it cannot be opened."""
    name = "wgpu" if adapter is None else f"wgpu:{adapter}"
    try:
        device = _open_wgpu(adapter)
    except (ImportError, OSError) as error:
        raise DeviceUnavailable(f"device {name}: {error}; pip install wgpu") from error
    except DeviceError as error:
        raise DeviceUnavailable(f"device {name}: {error}") from error
    device.reason = reason
    return device


def _open_wgpu(adapter: str | None) -> Device:
    """Open a wgpu device, again if it is lost meanwhile: a driver may be resetting the GPU for another program."""
    for pause in (*_PAUSES, None):
        try:
            device: Device = bind(importlib.import_module("wgrad.wgsl.device").WgpuDevice)(adapter)
            if matrix_units.first_check(device):
                device = bind(importlib.import_module("wgrad.wgsl.device").WgpuDevice)(adapter)
            turn_off_what_failed(device)
            return device
        except DeviceLost:
            if pause is None:
                raise
        time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _list_adapters(again: bool = False) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the adapters that can be used, and those that crash. again: whether to retry those that crashed before."""
    try:
        found = importlib.import_module("wgrad.wgsl.device").list_adapters(again)
        return [a for a in found if "crash" not in a], [a for a in found if "crash" in a]
    except (ImportError, OSError) as error:
        raise DeviceUnavailable(f"device wgpu: {error}; pip install wgpu") from error
    except DeviceError as error:
        raise DeviceUnavailable(f"device wgpu: {error}") from error


def list_devices() -> list[dict[str, Any]]:
    """Return the devices of this machine, the best first.

    Each has spec (for --device), name, usable, reason (why not, or a remark), and the device's facts
    (device/contract.py).
    """
    adapters: list[dict[str, Any]] = []
    try:
        adapters, crashes = _list_adapters(again=True)
        found = [{**a, "spec": f"wgpu:{a['index']}", "usable": True, "reason": ""} for a in adapters]
        reason = "not usable: it {crash}; update its driver, or remove it"
        found += [{**a, "spec": "wgpu", "usable": False, "reason": reason.format(**a)} for a in crashes]
    except DeviceUnavailable as error:
        found = [{"spec": "wgpu", "name": "WebGPU", "usable": False, "reason": _unusable(error)}]
    try:
        hip = [
            {
                **gpu.facts, "name": gpu.label, "spec": f"hip:{gpu.index}", "usable": not gpu.problem,
                "reason": f"not usable: {gpu.problem}" if gpu.problem else "",
            }
            for gpu in _list_hip()
        ]  # fmt: skip
    except DeviceUnavailable as error:
        reason = _unusable(error) if _concerns_amd(error, adapters) else "not usable: no AMD GPU was found"
        hip = [{"spec": "hip", "name": "AMD HIP", "usable": False, "reason": reason}]
    remark = "the reference that all others are checked against; slow compared with a GPU"
    cpu = {**ReferenceDevice().facts, "spec": "cpu", "usable": True, "reason": remark}
    software = [device for device in found if device.get("type") == SOFTWARE]
    return [*hip, *(device for device in found if device not in software), cpu, *software]
