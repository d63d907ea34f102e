"""Adapters: their list, the choice of one, and the features requested from it."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from wgrad.device.cache import cache_folder
from wgrad.device.errors import DeviceError, DeviceLost
from wgrad.device.whole_numbers import whole_number
from wgrad.wgsl.runtime import adapter_check, cooperative_shapes, matrix_units, native, vulkan_memory

# OpenGL is left out: its compute limits are unreliable, and every GPU that has it has another backend too.
_BACKENDS = ("Vulkan", "Metal", "D3D12")
_TYPES = ("DiscreteGPU", "IntegratedGPU", "VirtualGPU", "Unknown", "CPU")
INTEL, NVIDIA = 0x8086, 0x10DE  # PCI vendor ids
# Buffers in host memory that shaders and copies reach (`Runtime.empty_host`). No other buffer is affected.
HOST_BUFFERS = "mappable-primary-buffers"
# The most that a kernel binds: a GEMM of a weight in NF4 with double quantization and every epilogue. WebGPU promises
# 8, and drivers for DX12's first binding tier have no more.
STORAGE_BUFFERS = 11
# The least that the kernels need, with its name in an error. Vulkan promises 4, 16 KiB, 128 and 128.
NEEDED_LIMITS = {
    "max-storage-buffers-per-shader-stage": (STORAGE_BUFFERS, "storage buffers"),
    "max-compute-workgroup-storage-size": (16 << 10, "bytes of workgroup memory"),
    "max-compute-invocations-per-workgroup": (256, "invocations of a workgroup"),
    "max-compute-workgroup-size-x": (256, "invocations in a row of a workgroup"),
}
SUBGROUP_BARRIER = "subgroup-barrier"
WANTED_FEATURES = ("shader-f16", "subgroup", SUBGROUP_BARRIER, "timestamp-query", HOST_BUFFERS)
WANTED_LIMITS = (
    "max-buffer-size",
    "max-storage-buffer-binding-size",
    "max-storage-buffers-per-shader-stage",
    "max-compute-workgroup-storage-size",
    "max-compute-invocations-per-workgroup",
    "max-compute-workgroup-size-x",
    "max-compute-workgroup-size-y",
    "max-compute-workgroup-size-z",
)


def _rank(adapter: Any) -> tuple[int, int]:
    kind, backend = adapter.info["adapter_type"], adapter.info["backend_type"]
    return (_TYPES.index(kind) if kind in _TYPES else len(_TYPES), _BACKENDS.index(backend))


# Number of an adapter among those with its PCI ids and backend.
_ordinals: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_verdict: adapter_check.Verdict | None = None


def verdict(again: bool = False) -> adapter_check.Verdict:
    """Find the adapters that crash, before this process loads a driver. again: as in `adapter_check.check`."""
    global _verdict
    if _verdict is None:
        _verdict = adapter_check.check(f"{native.LIBRARY} {native.COPY_LOADED}", again)
        adapter_check.narrow(_verdict)
    return _verdict


def _usable() -> dict[int, Any]:
    """Adapters by their number in the list of all, best first, without those that crash."""
    known = verdict()
    if not known.backends:
        return {}
    crashed = {(crash.index, crash.name) for crash in known.crashes}
    found = enumerate(_listed(known.backends))
    return {number: a for number, a in found if (number, a.info["device"]) not in crashed}


def _listed(backends: Sequence[str]) -> list[Any]:
    try:
        adapters = native.enumerate_adapters(backends)
    except Exception as error:
        raise DeviceError(
            f"wgpu could not look for adapters: {error}; is a Vulkan, Metal or DX12 driver installed?"
        ) from error
    counts = Counter[tuple[Any, ...]]()
    for adapter in adapters:  # in the order of their driver
        same = tuple(adapter.info[name] for name in ("backend_type", "vendor_id", "device_id"))
        _ordinals[adapter] = counts[same]
        counts[same] += 1
    return sorted((a for a in adapters if a.info["backend_type"] in _BACKENDS), key=_rank)


def facts(adapter: Any) -> dict[str, Any]:
    """Describe an adapter: name, PCI vendor, backend, driver, memory (None: unknown), features, limits and so on."""
    info = adapter.info
    software = info["adapter_type"] == "CPU"  # whose heap size is made up
    return {
        "name": info["device"],
        "vendor_id": info["vendor_id"],
        "backend": info["backend_type"],
        "type": info["adapter_type"],
        "driver": info["description"],
        "library": native.LIBRARY,
        "memory_bytes": None if software else vulkan_memory.memory_bytes(info["vendor_id"], info["device_id"]),
        "features": sorted(adapter.features),
        "limits": dict(adapter.limits),
    }


def free_memory(adapter: Any) -> int | None:
    """Bytes of device memory that this process can still take; None where the driver does not tell."""
    info = adapter.info
    if info["adapter_type"] == "CPU":
        return None
    return vulkan_memory.free_bytes(info["vendor_id"], info["device_id"], _ordinals.get(adapter, 0))


def list_adapters(again: bool = False) -> list[dict[str, Any]]:
    """List every usable adapter (index and `facts`), best first, then each driver or adapter that crashes.

    The latter have `name` and `crash`, the reason. again: as in `adapter_check.check`.
    """
    crashes = verdict(again).crashes
    return [{"index": i, **facts(a)} for i, a in _usable().items()] + [
        {"name": c.name, "crash": c.reason} for c in crashes
    ]


def tell(backends: Sequence[str], skip: Collection[int]) -> None:
    """Body of the process of `adapter_check`: list the adapters and open them, with a line before each."""
    _no_dumps()
    said = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # so that output of drivers is not taken for an answer

    def say(*words: object) -> None:
        print(*words, file=said, flush=True)

    say("ready")
    listed = _listed(backends)
    said_of_all = [facts(adapter) for adapter in listed]
    say("listed", json.dumps([known["name"] for known in said_of_all]))
    for number, adapter in enumerate(listed):
        if number not in skip:
            say("opening", number)
            with suppress(DeviceError):  # reported when the adapter is used
                open_device(adapter).destroy()
    say("done")
    said.close()
    os._exit(0)  # no driver is asked to end


def _no_dumps() -> None:
    """Make a crash of this process leave no core dump and open no dialog."""
    if sys.platform == "win32":
        import ctypes

        ctypes.windll.kernel32.SetErrorMode(0x0001 | 0x0002)  # SEM_FAILCRITICALERRORS, SEM_NOGPFAULTERRORBOX
    else:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def choose(spec: str | None) -> Any:
    """The adapter for `spec`: None (the best), an index of `list_adapters`, or a part of the adapter's name."""
    spec, adapters, crashes = spec or "", _usable(), verdict().crashes
    if not adapters:
        if crashes:
            raise DeviceError("; ".join(f"{crash.name} {crash.reason}" for crash in crashes) + ": update the driver")
        raise DeviceError(
            "no Vulkan, Metal or DX12 adapter found: install the GPU's driver, or a software one"
            " (Debian and Ubuntu: apt-get install mesa-vulkan-drivers)"
        )
    named = _named(adapters, spec)
    for adapter in named:
        if not _shortage(adapter):
            return adapter
    if named:
        raise DeviceError(_shortage(named[0]))
    for crash in crashes:
        if spec == str(crash.index) or (whole_number(spec) is None and spec.lower() in crash.name.lower()):
            raise DeviceError(f"device 'wgpu:{spec}': {crash.name} {crash.reason}: update its driver")
    names = ", ".join(f"{i}: {a.info['device']}" for i, a in adapters.items())
    raise DeviceError(f"device 'wgpu:{spec}' matches no adapter; there are {names}")


def _named(adapters: Mapping[int, Any], spec: str) -> list[Any]:
    """Return the adapters that a spec may mean, best first."""
    if (index := whole_number(spec)) is not None:
        return [adapters[index]] if index in adapters else []
    return [adapter for adapter in adapters.values() if spec.lower() in adapter.info["device"].lower()]


def _shortage(adapter: Any) -> str:
    """Return an error that names what the adapter lacks, or "" where the kernels fit."""
    for limit, (least, what) in NEEDED_LIMITS.items():
        given = adapter.limits.get(limit, least)
        if given < least:
            return (
                f"adapter '{adapter.info['device']}' ({adapter.info['backend_type']}) gives a shader {given:,} {what},"
                f" and the kernels need {least:,}: update its driver, or use another device (wgrad devices lists them)"
            )
    return ""


def card(adapter: Any) -> str:
    """Key of a verdict on an adapter's tensor cores."""
    return matrix_units.identity(adapter.info["device"], adapter.info["description"])


def rate_file(adapter: Any, matrix_units_on: bool) -> Path:
    """File of the cache for the rate of this GPU with this driver, with tensor cores and without."""
    what = f"{card(adapter)}; {adapter.info['backend_type']}; {native.LIBRARY}; tensor cores: {matrix_units_on}"
    return cache_folder("rates") / f"{hashlib.sha256(what.encode()).hexdigest()[:32]}.json"


def matrix_shape(adapter: Any) -> cooperative_shapes.Shape | None:
    """Return the shape of its cooperative matrices that the kernels take, None where there is none."""
    info = adapter.info
    if info["backend_type"] not in matrix_units.BACKENDS or not matrix_units.among(adapter.features):
        return None
    return cooperative_shapes.choose(info["vendor_id"], info["device_id"])


def gives_matrix_units(index: int) -> bool:
    """Return whether the library in use makes a device with them. A stock one lists them and may refuse."""
    adapter = _usable()[index]
    try:
        adapter.request_device_sync(required_features=[*_wanted(adapter), matrix_units.FEATURE]).destroy()
    except Exception:
        native.error_log().messages.clear()
        return False
    return True


def matrix_unit_cards() -> list[dict[str, Any]]:
    """The adapters that list cooperative matrices: index, name, card."""
    return [{"index": i, "name": a.info["device"], "card": card(a)} for i, a in _usable().items() if matrix_shape(a)]


def orders_subgroups(features: Collection[str], info: Mapping[str, Any]) -> bool:
    """Return whether a barrier of a subgroup orders its workgroup memory on a device.

    NVIDIA's do, though by no promise, so the check of a GPU covers it (bench/notes/barriers.md).
    """
    return SUBGROUP_BARRIER in features and info.get("vendor_id") == NVIDIA


def _wanted(adapter: Any) -> list[str]:
    return [feature for feature in WANTED_FEATURES if feature in adapter.features]


def open_device(adapter: Any) -> Any:
    """Open a wgpu device with the wanted features that the adapter has, and its own limits.

    Raises:
        DeviceLost: It was lost as it was opened.
        DeviceError: The driver refuses it.
    """
    features = _wanted(adapter)
    limits = {name: adapter.limits[name] for name in WANTED_LIMITS if name in adapter.limits}
    asks = matrix_shape(adapter) and matrix_units.may_ask(card(adapter))
    for wanted in ([*features, matrix_units.FEATURE], features) if asks else (features,):
        try:
            return adapter.request_device_sync(required_features=wanted, required_limits=limits)
        except Exception as error:
            said = " ".join(str(error).split()) or type(error).__name__
            lost = isinstance(native.as_device_error(said, "it was opened"), DeviceLost)
            if lost or wanted is features:  # a library other than the checked one may refuse the feature
                kind = DeviceLost if lost else DeviceError
                raise kind(f"adapter '{adapter.info['device']}' gave no device: {said}") from error
    raise AssertionError("the last attempt returns or raises")
