"""AMD's software around a GPU, read from files: ROCm, drivers, firmware, topology (as in rocminfo), clocks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from wgrad.device.files import read_small

# Properties of a GPU's node in the topology, by the kernel driver's names.
_PROPERTIES = (
    "gfx_target_version", "simd_count", "simd_per_cu", "array_count", "cu_per_simd_array", "wave_front_size",
    "max_waves_per_simd", "lds_size_in_kb", "num_xcc", "max_engine_clk_fcompute", "vendor_id", "device_id",
    "drm_render_minor", "capability", "fw_version", "sdma_fw_version",
)  # fmt: skip
_CLOCKS = ("pp_dpm_sclk", "pp_dpm_mclk", "power_dpm_force_performance_level", "gpu_busy_percent")


def describe_system(root: Path = Path("/")) -> dict[str, Any]:
    """Return what a maintainer without the GPU needs; what is missing is left out. root: for tests.

    rocm, kernel, amdgpu: versions. gpus: properties of each GPU of the kernel driver. cards: for each card in
    /sys/class/drm its firmware versions and current clocks.
    """
    found: dict[str, Any] = {
        "rocm": _first(root, "opt/rocm/.info/version", "opt/rocm/.info/version-dev"),
        "kernel": _first(root, "proc/sys/kernel/osrelease"),
        "amdgpu": _first(root, "sys/module/amdgpu/version", "sys/module/amdgpu/srcversion"),
        "gpus": [],
        "cards": [],
    }
    for node in sorted(root.glob("sys/class/kfd/kfd/topology/nodes/*")):
        known = dict(line.split(maxsplit=1) for line in _text(node / "properties").splitlines() if " " in line)
        if int(known.get("simd_count", "0")):
            found["gpus"].append({name: int(known[name]) for name in _PROPERTIES if known.get(name, "").isdigit()})
    for card in sorted(root.glob("sys/class/drm/card[0-9]*/device")):
        if "-" in card.parent.name:  # a connector of a card
            continue
        firmware = {path.name.removesuffix("_fw_version"): _text(path) for path in card.glob("fw_version/*_fw_version")}
        clocks = {name: _current(_text(card / name)) for name in _CLOCKS}
        if firmware:
            known = {name: text for name, text in clocks.items() if text}
            found["cards"].append({"firmware": dict(sorted(firmware.items())), "clocks": known})
    return {name: value for name, value in found.items() if value}


def read_sensors(root: Path = Path("/")) -> dict[str, float]:
    """Return the current clocks in MHz, power in W and temperature in °C of the GPU that draws most power.

    root: for tests.
    """
    found = [_sensors(card) for card in root.glob("sys/class/drm/card[0-9]*/device") if "-" not in card.parent.name]
    return max(found, key=lambda sensors: sensors.get("watt", 0.0), default={})


def _sensors(card: Path) -> dict[str, float]:
    texts = {name: _current(_text(card / f"pp_dpm_{name}")) for name in ("sclk", "mclk")}
    known = {f"{name}_mhz": float(text[:-3]) for name, text in texts.items() if re.fullmatch(r"\d+Mhz", text, re.I)}
    for name, files, unit in (("watt", ("power1_average", "power1_input"), 1e-6), ("celsius", ("temp1_input",), 1e-3)):
        read = [_text(path) for file in files for path in card.glob(f"hwmon/hwmon*/{file}")]
        if read and read[0].isdigit():
            known[name] = unit * float(read[0])
    return known


def _current(text: str) -> str:
    """Return the active line of a table of clocks, marked with a star; of a single line the text itself."""
    starred = re.search(r"^\d+: (.*?) ?\*$", text, re.MULTILINE)
    return starred[1] if starred else text if "\n" not in text else ""


def _first(root: Path, *files: str) -> str:
    return next(filter(None, (_text(root / file) for file in files)), "")


def _text(path: Path) -> str:
    return read_small(path, 10_000)
