"""Memory of each Vulkan device. WebGPU does not tell it, so the loader is asked directly.

Vulkan 1.3 specification, sections 4 and 5: vkEnumeratePhysicalDevices, VkPhysicalDeviceProperties,
VkPhysicalDeviceMemoryProperties; VK_EXT_memory_budget. On Windows the loader comes with the GPU's driver, so it knows
DX12's GPUs as well.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

_LIBRARIES = ("libvulkan.so.1", "vulkan-1.dll", "libvulkan.1.dylib")
# VkStructureType
_APPLICATION_INFO, _INSTANCE_CREATE_INFO = 0, 1
_MEMORY_PROPERTIES_2, _MEMORY_BUDGET = 1000059006, 1000237000
_VERSION_1_1 = 1 << 22 | 1 << 12  # from which an instance tells budgets
_BUDGET_EXTENSION = b"VK_EXT_memory_budget"
_DEVICE_LOCAL = 1  # VkMemoryHeapFlagBits


class _ApplicationInfo(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("version", ctypes.c_uint32),
        ("engine", ctypes.c_char_p),
        ("engine_version", ctypes.c_uint32),
        ("api_version", ctypes.c_uint32),
    ]


class _InstanceInfo(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("application", ctypes.POINTER(_ApplicationInfo)),
        ("layers", ctypes.c_uint32),
        ("layer_names", ctypes.c_void_p),
        ("extensions", ctypes.c_uint32),
        ("extension_names", ctypes.c_void_p),
    ]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("api_version", ctypes.c_uint32),
        ("driver_version", ctypes.c_uint32),
        ("vendor", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("type", ctypes.c_uint32),
        ("name", ctypes.c_char * 256),
        ("rest", ctypes.c_uint64 * 128),  # limits and more, some 550 bytes: not read
    ]


class _Heap(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint64), ("flags", ctypes.c_uint32)]


class _Memory(ctypes.Structure):
    _fields_ = [
        ("type_count", ctypes.c_uint32),
        ("types", ctypes.c_uint32 * 64),
        ("heap_count", ctypes.c_uint32),
        ("heaps", _Heap * 16),
    ]


class _Budget(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("budget", ctypes.c_uint64 * 16),
        ("usage", ctypes.c_uint64 * 16),
    ]


class _Memory2(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint32), ("next", ctypes.POINTER(_Budget)), ("memory", _Memory)]


class _Extension(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char * 256), ("version", ctypes.c_uint32)]


def memory_bytes(vendor: int, device: int) -> int | None:
    """Bytes of the largest memory heap of the GPU with these PCI ids; None if no Vulkan driver knows it."""
    return _heaps().get((vendor, device))


def free_bytes(vendor: int, device: int, ordinal: int) -> int | None:
    """Bytes of the largest heap that this process can still take; None if no Vulkan driver tells.

    ordinal: among the GPUs with these PCI ids, in the driver's order.
    """
    with physical_devices() as devices:
        same = [found for found in devices if found.ids == (vendor, device)]
        if ordinal >= len(same) or not _tells_budget(same[ordinal]):
            return None
        budget = _Budget(type=_MEMORY_BUDGET)
        asked = _Memory2(type=_MEMORY_PROPERTIES_2, next=ctypes.pointer(budget))
        same[ordinal].vulkan.vkGetPhysicalDeviceMemoryProperties2(same[ordinal].handle, ctypes.byref(asked))
        sizes = [(asked.memory.heaps[heap].size, heap) for heap in _local_heaps(asked.memory)]
        if not sizes:
            return None
        _, heap = max(sizes)
        return max(int(budget.budget[heap]) - int(budget.usage[heap]), 0)


def _tells_budget(device: PhysicalDevice) -> bool:
    if device.api_version < _VERSION_1_1 or not hasattr(device.vulkan, "vkGetPhysicalDeviceMemoryProperties2"):
        return False
    ask, count = device.vulkan.vkEnumerateDeviceExtensionProperties, ctypes.c_uint32()
    ask(device.handle, None, ctypes.byref(count), None)
    extensions = (_Extension * count.value)()
    ask(device.handle, None, ctypes.byref(count), extensions)
    return any(extension.name == _BUDGET_EXTENSION for extension in extensions[: count.value])


def _local_heaps(memory: _Memory) -> list[int]:
    return [heap for heap in range(memory.heap_count) if memory.heaps[heap].flags & _DEVICE_LOCAL]


@dataclass(frozen=True)
class PhysicalDevice:
    """A device of an open instance: the loader, both handles, PCI ids and Vulkan version."""

    vulkan: Any
    instance: ctypes.c_void_p
    handle: ctypes.c_void_p
    ids: tuple[int, int]
    api_version: int = 0


@contextmanager
def physical_devices() -> Iterator[list[PhysicalDevice]]:
    """Yield every device that a Vulkan driver knows; none if there is no Vulkan."""
    instance = ctypes.c_void_p()
    vulkan = _loader()
    application = _ApplicationInfo(type=_APPLICATION_INFO, api_version=_VERSION_1_1)
    infos = [_InstanceInfo(type=_INSTANCE_CREATE_INFO, application=ctypes.pointer(application))]
    infos.append(_InstanceInfo(type=_INSTANCE_CREATE_INFO))  # of a loader of Vulkan 1.0
    if vulkan is None or all(vulkan.vkCreateInstance(ctypes.byref(i), None, ctypes.byref(instance)) for i in infos):
        yield []
        return
    try:
        count = ctypes.c_uint32()
        vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
        devices = (ctypes.c_void_p * count.value)()
        vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), devices)
        found = []
        for device in map(ctypes.c_void_p, devices[: count.value]):
            properties = _Properties()
            vulkan.vkGetPhysicalDeviceProperties(device, ctypes.byref(properties))
            ids = properties.vendor, properties.device
            found.append(PhysicalDevice(vulkan, instance, device, ids, properties.api_version))
        yield found
    finally:
        vulkan.vkDestroyInstance(instance, None)


def _loader() -> Any:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@cache
def _heaps() -> dict[tuple[int, int], int]:
    """Return the bytes of each device's largest device-local heap, by (vendor, device)."""
    found = {}
    with physical_devices() as devices:
        for device in devices:
            memory = _Memory()
            device.vulkan.vkGetPhysicalDeviceMemoryProperties(device.handle, ctypes.byref(memory))
            sizes = [memory.heaps[heap].size for heap in _local_heaps(memory)]
            if sizes:
                # A second heap is often a window on the first, so sizes are not added up.
                found[device.ids] = max(sizes)
    return found
