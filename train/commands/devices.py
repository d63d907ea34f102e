"""`wgrad devices`: the devices of this machine, with the features that matter here, and the one that is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wgrad.autograd.select_device import list_devices, select_device
from wgrad.device.errors import DeviceError, WgradError
from wgrad.device.main_memory import main_memory
from wgrad.train.terminal.output import harmless

_FEATURES = {
    "shader-f16": "--compute float16",
    "timestamp-query": "--profile",
}
_LIMITS = {
    "max-buffer-size": "largest buffer",
    "max-storage-buffer-binding-size": "largest binding",
    "max-compute-workgroup-storage-size": "workgroup memory",
    "max-compute-invocations-per-workgroup": "workgroup invocations",
}


def readable_bytes(count: float) -> str:
    """Return a number of bytes for people, such as '1.5 KiB' for 1536."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" or count == int(count) else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def memory_in_words(device: Mapping[str, Any]) -> str:
    """Return the memory of a device of `list_devices` for people, as far as it is known."""
    if device.get("memory_bytes"):
        shared = ", of main memory" if device.get("type") == "IntegratedGPU" else ""
        return readable_bytes(device["memory_bytes"]) + shared
    total = main_memory()
    if total and (device.get("spec") == "cpu" or device.get("type") == "CPU"):
        return f"{readable_bytes(total)}, main memory"
    if total and device.get("backend") == "Metal" and device.get("type") != "DiscreteGPU":
        return f"shared with the CPU, which has {readable_bytes(total)}"
    return "unknown: the driver does not tell"


def describe(device: Mapping[str, Any]) -> str:
    """Return a few lines about an entry of `list_devices`."""
    head = ", ".join(str(device[k]) for k in ("backend", "type", "driver") if device.get(k))
    lines = [f"{device.get('spec', device.get('name'))}: {device.get('name')}" + (f" ({head})" if head else "")]
    if device.get("reason"):
        lines.append(f"    {device['reason']}")
    if device.get("usable", True):
        lines.append(f"    memory {memory_in_words(device)}")
    if "features" in device:
        have = [f"{name} ({use})" for name, use in _FEATURES.items() if name in device["features"]]
        lack = [f"{name} ({use})" for name, use in _FEATURES.items() if name not in device["features"]]
        lines.append("    has    " + (", ".join(have) or "none of " + ", ".join(_FEATURES)))
        if lack:
            lines.append("    lacks  " + ", ".join(lack))
    limits = device.get("limits") or {}
    shown = [
        f"{text} {readable_bytes(limits[name]) if 'invocations' not in name else limits[name]}"
        for name, text in _LIMITS.items()
        if name in limits
    ]
    if shown:
        lines.append("    limits " + ", ".join(shown))
    return "\n".join(lines)


def print_devices() -> int:
    """Print every device, and which one `--device auto` takes. Return 0, or 1 if none can be used."""
    for device in list_devices():
        print(harmless(describe(device)))
    expected: tuple[type[BaseException], ...] = (WgradError, DeviceError)
    try:
        chosen = select_device("auto")
    except expected as error:
        print(f"--device auto finds none: {error}")
        return 1
    print(f"--device auto takes {chosen.name}: {chosen.description} ({getattr(chosen, 'reason', '')})")
    return 0
