"""How much memory each Vulkan device has. WebGPU does not tell, so the loader is asked directly.

Vulkan 1.3 specification, sections 4 and 5: vkEnumeratePhysicalDevices, VkPhysicalDeviceProperties,
VkPhysicalDeviceMemoryProperties. On Windows the loader comes with the card's driver, so it knows DX12's cards as well.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

_LIBRARIES = ("libvulkan.so.1", "vulkan-1.dll", "libvulkan.1.dylib")
_INSTANCE_CREATE_INFO = 1  # VkStructureType
_DEVICE_LOCAL = 1  # VkMemoryHeapFlagBits


class _InstanceInfo(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("application", ctypes.c_void_p),
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


def memory_bytes(vendor: int, device: int) -> int | None:
    """Bytes of the largest memory heap of the card with these PCI ids; None where no Vulkan driver knows it."""
    return _heaps().get((vendor, device))


@dataclass(frozen=True)
class PhysicalDevice:
    """A device of an open instance: the loader, both handles, and its PCI ids."""

    vulkan: Any
    instance: ctypes.c_void_p
    handle: ctypes.c_void_p
    ids: tuple[int, int]


@contextmanager
def physical_devices() -> Iterator[list[PhysicalDevice]]:
    """Every device that a Vulkan driver knows. None where Vulkan cannot be asked."""
    instance = ctypes.c_void_p()
    vulkan = _loader()
    info = _InstanceInfo(type=_INSTANCE_CREATE_INFO)
    if vulkan is None or vulkan.vkCreateInstance(ctypes.byref(info), None, ctypes.byref(instance)):
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
            found.append(PhysicalDevice(vulkan, instance, device, (properties.vendor, properties.device)))
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
    """(vendor, device) -> bytes of the largest device-local heap."""
    found = {}
    with physical_devices() as devices:
        for device in devices:
            memory = _Memory()
            device.vulkan.vkGetPhysicalDeviceMemoryProperties(device.handle, ctypes.byref(memory))
            sizes = [heap.size for heap in memory.heaps[: memory.heap_count] if heap.flags & _DEVICE_LOCAL]
            if sizes:
                # A second heap is often a window on the first, so sizes are not added up.
                found[device.ids] = max(sizes)
    return found
