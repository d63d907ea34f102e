"""Descriptions of adapters, and their memory as the Vulkan loader reports it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wgrad.device.errors import DeviceError
from wgrad.wgsl.runtime import adapters, vulkan_memory


def test_facts_of_a_software_driver_have_no_memory(wgpu_device: Any) -> None:
    facts = wgpu_device.facts
    assert facts["name"] in wgpu_device.description and facts["library"].startswith("wgpu-native ")
    assert (facts["memory_bytes"] is None) == (facts["type"] == "CPU" or facts["backend"] == "Metal")


def test_a_gpu_has_its_largest_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vulkan_memory, "_heaps", lambda: {(0x10DE, 7): 2**33})
    info = {"device": "Card", "backend_type": "D3D12", "adapter_type": "DiscreteGPU", "description": "1"}
    known = SimpleNamespace(info=info | {"vendor_id": 0x10DE, "device_id": 7}, features=["b", "a"], limits={"x": 1})
    other = SimpleNamespace(info=info | {"vendor_id": 0x10DE, "device_id": 8}, features=[], limits={})
    assert adapters.facts(known)["memory_bytes"] == 2**33 and adapters.facts(known)["features"] == ["a", "b"]
    assert adapters.facts(other)["memory_bytes"] is None


def test_every_vulkan_adapter_is_known_to_the_loader(wgpu_device: Any) -> None:
    """The structures are laid out as the loader fills them in: ids that wgpu gives too, and heaps of a likely size."""
    if wgpu_device.facts["backend"] != "Vulkan":
        pytest.skip("no Vulkan here")
    heaps = vulkan_memory._heaps()
    seen = {
        (a.info["vendor_id"], a.info["device_id"])
        for a in adapters._usable().values()
        if a.info["backend_type"] == "Vulkan"
    }
    assert seen <= set(heaps)
    assert all(2**26 <= size < 2**48 for size in heaps.values())


def test_no_loader_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vulkan_memory, "_LIBRARIES", ("libnothing-of-that-name.so",))
    assert vulkan_memory._heaps.__wrapped__() == {}


def test_no_shader_binds_more_storage_buffers_than_adapters_are_asked_for() -> None:
    bound = [
        int(number)
        for file in Path(adapters.__file__).parents[1].rglob("*.wgsl")
        for number in re.findall(r"@binding\((\d+)\) var<storage", file.read_text(encoding="utf-8"))
    ]
    assert max(bound) == adapters.STORAGE_BUFFERS and 0 not in bound


@pytest.mark.parametrize(
    ("limit", "least", "too_few", "said"),
    [
        ("max-storage-buffers-per-shader-stage", 11, 8, "8 storage buffers"),
        ("max-compute-workgroup-storage-size", 16384, 16383, "16,383 bytes of workgroup memory"),
        ("max-compute-invocations-per-workgroup", 256, 128, "128 invocations of a workgroup"),
        ("max-compute-workgroup-size-x", 256, 128, "128 invocations in a row of a workgroup"),
    ],
)
def test_an_adapter_whose_limits_are_too_low_is_passed_over(
    limit: str, least: int, too_few: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def adapter(name: str, given: int) -> Any:
        info = {"device": name, "backend_type": "D3D12"}
        return SimpleNamespace(info=info, limits={limit: given})

    small, large = adapter("Card", too_few), adapter("Card", least)
    monkeypatch.setattr(adapters, "verdict", lambda: SimpleNamespace(crashes=[]))
    monkeypatch.setattr(adapters, "_usable", lambda: {0: small, 2: large})
    assert adapters.choose(None) is adapters.choose("card") is adapters.choose("2") is large
    with pytest.raises(DeviceError, match=rf"adapter 'Card' \(D3D12\) gives a shader {said}, .* need {least:,}: "):
        adapters.choose("0")
    monkeypatch.setattr(adapters, "_usable", lambda: {0: small})
    with pytest.raises(DeviceError, match=said):
        adapters.choose(None)


@pytest.mark.parametrize("tells", [True, False])
def test_what_is_free_is_the_budget_less_what_is_used(monkeypatch: pytest.MonkeyPatch, tells: bool) -> None:
    """Read the largest heap of device memory of the right one of two equal GPUs; None without the extension."""

    def enumerate_extensions(handle: Any, layer: Any, count: Any, places: Any) -> int:
        count._obj.value = 2
        if places is not None:
            places[0].name, places[1].name = b"VK_KHR_other", b"VK_EXT_memory_budget" if tells else b"VK_EXT_more"
        return 0

    def memory_of(handle: int, asked: Any) -> None:
        memory, budget = asked._obj.memory, asked._obj.next.contents
        assert (asked._obj.type, budget.type) == (1000059006, 1000237000)
        memory.heap_count = 3
        for heap, (nbytes, flags) in enumerate([(64 << 30, 0), (24 << 30, 1), (1 << 28, 1)]):
            memory.heaps[heap].size, memory.heaps[heap].flags = nbytes, flags
            budget.budget[heap], budget.usage[heap] = nbytes - handle, 5

    functions: dict[str, Any] = {"vkEnumerateDeviceExtensionProperties": enumerate_extensions}
    functions["vkGetPhysicalDeviceMemoryProperties2"] = memory_of
    vulkan = SimpleNamespace(**functions)

    @contextmanager
    def devices() -> Iterator[list[Any]]:
        version = 1 << 22 | 3 << 12
        others = [vulkan_memory.PhysicalDevice(vulkan, None, handle, (1, 2), version) for handle in (7, 9)]  # type: ignore[arg-type]
        yield [vulkan_memory.PhysicalDevice(vulkan, None, 1, (1, 1), version), *others]  # type: ignore[arg-type]

    monkeypatch.setattr(vulkan_memory, "physical_devices", devices)
    for ordinal, handle in ((0, 7), (1, 9)):
        assert vulkan_memory.free_bytes(1, 2, ordinal) == ((24 << 30) - handle - 5 if tells else None)
    assert vulkan_memory.free_bytes(1, 2, 2) is None and vulkan_memory.free_bytes(3, 3, 0) is None


def test_barriers_of_subgroups_order_memory_on_nvidias_gpus_alone() -> None:
    """No specification promises it."""
    barrier = {"subgroup", adapters.SUBGROUP_BARRIER}
    assert adapters.SUBGROUP_BARRIER in adapters.WANTED_FEATURES
    found = [adapters.orders_subgroups(barrier, {"vendor_id": vendor}) for vendor in (0x10DE, 0x1002, 0x8086)]
    assert found == [True, False, False]
    assert not adapters.orders_subgroups({"subgroup"}, {"vendor_id": 0x10DE})
    assert not adapters.orders_subgroups(barrier, {})
