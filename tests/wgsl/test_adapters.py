"""What is said of an adapter, and how much memory the Vulkan loader gives it."""

from __future__ import annotations

import re
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


def test_a_card_has_its_largest_heap(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_adapter_with_too_few_storage_buffers_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def adapter(name: str, buffers: int) -> Any:
        info = {"device": name, "backend_type": "D3D12"}
        return SimpleNamespace(info=info, limits={"max-storage-buffers-per-shader-stage": buffers})

    small, large = adapter("Card", 8), adapter("Card", 11)
    monkeypatch.setattr(adapters, "verdict", lambda: SimpleNamespace(crashes=[]))
    monkeypatch.setattr(adapters, "_usable", lambda: {0: small, 2: large})
    assert adapters.choose(None) is adapters.choose("card") is adapters.choose("2") is large
    with pytest.raises(DeviceError, match=r"adapter 'Card' \(D3D12\) gives a shader 8 storage buffers.* need 11: "):
        adapters.choose("0")
    monkeypatch.setattr(adapters, "_usable", lambda: {0: small})
    with pytest.raises(DeviceError, match="8 storage buffers"):
        adapters.choose(None)
