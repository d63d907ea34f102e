"""Shapes of a GPU's cooperative matrices with float16 factors and float32 sums, from Vulkan: wgpu does not tell.

Vulkan, VK_KHR_cooperative_matrix: vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

from wgrad.wgsl.runtime.vulkan_memory import PhysicalDevice, physical_devices

_FLOAT16, _FLOAT32, _SUBGROUP = 0, 1, 3  # VkComponentTypeKHR, VkScopeKHR
_PROPERTIES = 1000506001  # VkStructureType
_MOST = 256  # shapes that are read


class Shape(NamedTuple):
    """Rows of the left factor, columns of the right one, and the inner dimension."""

    m: int
    n: int
    k: int


# Kernels are written for this shape. Shapes whose sides divide its sides are served in parts (cooperative_text.py).
BLOCK = Shape(16, 16, 16)
# Best first; those for which naga 29 has types. It has none for Intel's 8 x 16 x 16 (Xe2) and 8 x 8 x 16 (DG2). Vulkan
# does not tell Metal's 8 x 8 x 8 (matrix_units.BACKENDS).
KERNEL_SHAPES = (BLOCK, Shape(8, 8, 8))


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("sizes", ctypes.c_uint32 * 3),
        ("components", ctypes.c_uint32 * 4),  # of the left factor, the right one, the addend and the result
        ("saturating", ctypes.c_uint32),
        ("scope", ctypes.c_uint32),
    ]


def choose(vendor: int, device: int) -> Shape | None:
    """Return the best shape of the kernels that the GPU with these PCI ids has; BLOCK where no Vulkan driver tells.

    Intel's GPUs have others, and compile kernels of 16 x 16 x 16 without an error.
    """
    found = _shapes().get((vendor, device))
    return BLOCK if found is None else next((shape for shape in KERNEL_SHAPES if shape in found), None)


@cache
def _shapes() -> dict[tuple[int, int], frozenset[Shape]]:
    """Return the shapes of each device that reports them, by (vendor, device)."""
    with physical_devices() as devices:
        told = {device.ids: _shapes_of(device) for device in devices}
    return {ids: shapes for ids, shapes in told.items() if shapes is not None}


def _shapes_of(device: PhysicalDevice) -> frozenset[Shape] | None:
    look_up = device.vulkan.vkGetInstanceProcAddr
    look_up.restype = ctypes.c_void_p
    place = look_up(device.instance, b"vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR")
    if not place:
        return None
    ask = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(place)
    count = ctypes.c_uint32()
    if ask(device.handle, ctypes.byref(count), None) < 0 or not count.value:
        return None
    count.value = min(count.value, _MOST)
    found = (_Properties * count.value)(*(_Properties(type=_PROPERTIES) for _ in range(count.value)))
    if ask(device.handle, ctypes.byref(count), found) < 0:
        return None
    wanted = [_FLOAT16, _FLOAT16, _FLOAT32, _FLOAT32]
    return frozenset(
        Shape(*p.sizes) for p in found[: count.value] if list(p.components) == wanted and p.scope == _SUBGROUP
    )
