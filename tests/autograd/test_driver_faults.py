"""Reported faults of drivers: which adapters each concerns, and which it does not."""

from __future__ import annotations

import re
from typing import Any

import pytest

from wgrad.autograd.driver_faults import AMD, FAULTS, INTEL, NVIDIA, QUALCOMM, known_faults
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.errors import WgradError
from wgrad.train.options.finetune_config import FinetuneConfig
from wgrad.train.run import session
from wgrad.train.step.checked import fault_notes

F16 = ["shader-f16", "subgroup"]
B580 = {"name": "Intel(R) Arc(tm) B580 Graphics (BMG G21)", "vendor_id": INTEL, "backend": "Vulkan", "features": F16}
B580 |= {"type": "DiscreteGPU", "driver": "Mesa 26.2.1", "library": "wgpu-native 29.0.1.1"}
B390 = B580 | {"name": "Intel(R) Arc(tm) B390 (PTL)", "type": "IntegratedGPU", "driver": "Mesa 26.1.5"}
B390 |= {"features": [*F16, "cooperative-matrix"]}
RADEON = B580 | {"name": "AMD Radeon RX 7900 XTX (RADV NAVI31)", "vendor_id": AMD}
STRIX = RADEON | {"name": "Radeon 8060S Graphics (RADV STRIX_HALO)", "type": "IntegratedGPU"}
M4 = B580 | {"name": "Apple M4 Max", "vendor_id": 0x106B, "backend": "Metal", "type": "IntegratedGPU", "driver": ""}
GTX = B580 | {
    "name": "NVIDIA GeForce GTX 1080 Ti",
    "vendor_id": NVIDIA,
    "driver": "580.95.05",
    "features": ["subgroup"],
}

XE3 = "26.1.6.html"

# (adapter, system, kernel, number of the source's issue or XE3, or several; 0 where nothing is known)
CASES: list[tuple[dict[str, Any], str, str, int | str | tuple[int, ...]]] = [
    (B580, "Linux", "6.17.0", 25767),
    (B580 | {"name": "Intel(R) Arc(tm) Pro B70 Graphics"}, "Linux", "", 25767),
    (B580 | {"driver": "Mesa 26.2.2"}, "Linux", "", 0),
    (B580 | {"driver": "Mesa 26.10.0-devel (git-1)"}, "Linux", "", 0),
    (B580 | {"driver": "32.0.101.8826"}, "Windows", "", 22034),
    (B580 | {"name": "Intel(R) Arc(tm) A770 Graphics (DG2)"}, "Linux", "", 0),
    (B390, "Linux", "", XE3),
    (B390 | {"name": "Intel(R) Graphics (PTL)"}, "Linux", "", XE3),
    (B390 | {"driver": "Mesa 26.1.6"}, "Linux", "", 0),
    (B390 | {"driver": "32.0.101.8826"}, "Windows", "", 0),
    (B390 | {"features": F16}, "Linux", "", 0),
    (B390 | {"name": "Intel(R) Graphics (LNL)"}, "Linux", "", 0),
    (B580 | {"name": "Adreno (TM) 702", "vendor_id": QUALCOMM}, "Linux", "", 25906),
    (B580 | {"name": "Adreno (TM) 740", "vendor_id": QUALCOMM}, "Linux", "", 0),
    (RADEON | {"name": "AMD Radeon Pro 5500M", "driver": "1.4.1"}, "Darwin", "", 2756),
    (B580 | {"name": "Intel(R) UHD Graphics 630", "driver": "1.4.1"}, "Darwin", "", 2757),
    (STRIX | {"driver": "26.3.1 (LLPC)"}, "Windows", "", 422),
    (STRIX | {"driver": "", "backend": "D3D12"}, "Windows", "", 0),
    (RADEON | {"driver": "26.3.1 (LLPC)"}, "Windows", "", 0),
    (STRIX, "Linux", "7.0.13-arch1-1", 25664),
    (STRIX, "Linux", "6.18.44", 0),
    (RADEON | {"driver": "26.5.1 (LLPC)"}, "Windows", "", 23508),
    (RADEON | {"driver": "26.10.2 (LLPC)"}, "Windows", "", 23508),
    (RADEON | {"driver": "26.5.1 (LLPC)", "backend": "D3D12"}, "Windows", "", 0),
    (RADEON | {"driver": "Mesa 26.5.1"}, "Linux", "", 0),
    (B580 | {"driver": "101.8860"}, "Windows", "", 0),
    (B580 | {"driver": "101.8515"}, "Windows", "", 22034),
    (B580 | {"driver": "32.0.101.8515", "backend": "D3D12"}, "Windows", "", 0),
    (B580 | {"driver": "32.0.101.8515", "type": "IntegratedGPU"}, "Windows", "", 0),
    (M4, "Darwin", "25.1.0", (9531, 4500)),
    (M4 | {"library": "wgpu-native 30.0.0.0"}, "Darwin", "", 4500),
    (B580 | {"backend": "D3D12", "driver": "", "features": ["subgroup"]}, "Windows", "", 2722),
    (B580 | {"backend": "D3D12", "driver": ""}, "Windows", "", 0),
    (RADEON | {"bar_bytes": 256 << 20}, "Linux", "", 27097),
    (RADEON | {"bar_bytes": 32 << 30}, "Linux", "", 0),
    (RADEON | {"bar_bytes": None}, "Linux", "", 0),
    (GTX, "Linux", "", 1836),
    (GTX | {"name": "Tesla P40"}, "Linux", "", 1836),
    (GTX | {"name": "NVIDIA GeForce GTX 1660"}, "Linux", "", 0),
    (GTX | {"name": "NVIDIA H100 PCIe", "features": F16}, "Linux", "", 0),
    (RADEON | {"name": "AMD Radeon RX 580 Series (RADV POLARIS10)", "features": []}, "Linux", "", 94),
    (RADEON | {"features": [*F16, "cooperative-matrix"]}, "Linux", "", 16339),
    (RADEON | {"name": "AMD Radeon RX 6800 XT (RADV NAVI21)"}, "Linux", "", 0),
    ({"name": "NumPy", "vendor_id": None}, "Linux", "", 0),
]


@pytest.mark.parametrize(("adapter", "system", "kernel", "number"), CASES)
def test_a_fault_is_found_by_gpu_driver_and_version(
    adapter: dict[str, Any], system: str, kernel: str, number: int | str | tuple[int, ...]
) -> None:
    found = [fault.source.rpartition("/")[2] for fault in known_faults(adapter, system, kernel)]
    assert found == [str(part) for part in (number if isinstance(number, tuple) else (number,) * bool(number))]


def test_every_fault_has_a_source_an_adapter_and_words() -> None:
    reached = {fault for adapter, system, kernel, _ in CASES for fault in known_faults(adapter, system, kernel)}
    assert reached == set(FAULTS)
    for fault in FAULTS:
        issue, notes = r"github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", r"docs\.mesa3d\.org/relnotes/[\d.]+\.html"
        assert re.fullmatch(f"{issue}|{notes}", fault.source)
        assert fault.advice and fault.seen and not fault.text.endswith(".") and len(fault.text) < 260


def test_a_run_tells_of_wrong_results_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ReferenceDevice()
    monkeypatch.setattr("wgrad.train.step.checked.platform.system", lambda: "Linux")
    assert fault_notes(device) == []
    for facts, count in ((B580, 1), (GTX, 0), (RADEON | {"bar_bytes": 1}, 0)):
        device.facts = facts
        assert len(fault_notes(device)) == count
    device.facts = B580
    (line,) = fault_notes(device)
    assert line.startswith("note: reported of this driver: matmuls on Battlemage are wrong now and then")


def test_a_run_says_it_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(*_: object) -> str:
        raise WgradError("enough")

    monkeypatch.setattr(session, "fault_notes", lambda device: [f"note: reported of {device.name}"])
    monkeypatch.setattr(session, "hold_to_limit", stop)
    with pytest.raises(WgradError, match="enough"):
        session.open_session(FinetuneConfig(model="m", data=("d",), out="o", device="cpu"))
    assert capsys.readouterr().out.count("note: reported of cpu") == 1
