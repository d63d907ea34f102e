"""Predicted times of the HIP kernels, which a report puts next to the measured ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wgrad.hip.expected import SHARES, expect
from wgrad.hip.runtime.architectures import SHIPPED
from wgrad.hip.runtime.objects import HIP
from wgrad.hip.runtime.system import read_sensors

# As AMD's pages have them: TFLOP/s in 16 bits and float32, GB/s.
GPUS = {
    "MI250X, one die": ("gfx90a", 110, 1700, 1600, 4096, 191.5, 47.9, 1638.0),
    "MI300X": ("gfx942", 304, 2100, 1300, 8192, 1307.4, 163.4, 5325.0),
    "MI355X": ("gfx950", 256, 2400, 1953, 8192, 2516.6, 157.3, 8000.0),
    "RX 7900 XTX": ("gfx1100", 96, 2500, 1249, 384, 122.8, 61.4, 960.0),
    "RX 9070 XT": ("gfx1201", 64, 2970, 1258, 256, 194.6, 48.7, 640.0),
    "Radeon 8060S": ("gfx1151", 40, 2900, 1000, 256, 59.4, 29.7, 256.0),
}


@pytest.mark.parametrize("name", GPUS)
def test_peaks_are_the_makers(name: str) -> None:
    architecture, units, clock, memory_clock, bits, matrix, float32, memory = GPUS[name]
    facts = {"architecture": architecture, "compute_units": units, "clock_mhz": clock}
    facts |= {"memory_clock_mhz": memory_clock, "memory_bus_bits": bits}
    shares = json.loads((HIP / "objects" / SHARES).read_text())
    found = expect(facts, [("gemm", "gemm_bf16_nt_big"), ("storage", "fill")], 1e15, 1.0)
    share = shares["gfx1100" if architecture == "gfx1151" else architecture]["gemm_bf16_nt_big"]
    assert found is not None and found.share == share and 0.5 < share < 1 and found.bound == "arithmetic"
    assert found.seconds == pytest.approx(1e3 / (matrix * share), rel=0.01)
    found = expect(facts, [("gemm_f32", "a kernel without a share")], 1e15, 1.0)
    assert found is not None and found.seconds == pytest.approx(1e3 / float32, rel=0.01)
    found = expect(facts, [("norm", "rms_norm")], 1.0, 1e12)
    assert found is not None and found.bound == "memory" and found.seconds == pytest.approx(1e3 / memory, rel=0.01)
    assert expect(facts | {"clock_mhz": 0}, [], 1.0, 1.0) is None


def test_attention_has_shares_on_every_architecture() -> None:
    shares = json.loads((HIP / "objects" / SHARES).read_text())
    named = {a: {kernel for kernel in shares[a] if kernel.startswith("attention")} for a in SHIPPED}
    assert len(named["gfx942"]) == 24 and all(kernels == named["gfx942"] for kernels in named.values())


def test_instructions_of_half_the_depth_reach_half_the_peak_of_gfx950() -> None:
    """The forward has no others. Its share is of the same peak as that of GEMMs."""
    shares = json.loads((HIP / "objects" / SHARES).read_text())
    attention = {a: {k: s for k, s in shares[a].items() if k.startswith("attention")} for a in ("gfx942", "gfx950")}
    assert attention["gfx950"].keys() == attention["gfx942"].keys()
    for kernel, share in attention["gfx950"].items():
        most = 0.5 if "forward" in kernel else 0.75 if "dq" in kernel else 2 / 3
        assert 0.2 < share < most and share < attention["gfx942"][kernel]


def test_an_operator_is_predicted_by_the_kernels_that_it_launches(hip_device: Any) -> None:
    """The emulated driver tells a clock of 1 GHz, and none of the memory."""
    a = np.zeros((128, 128), np.float16)
    kernels = hip_device.kernels_of(lambda dry: dry.gemm(dry.upload(a), dry.upload(a)))
    assert ("gemm", "gemm_f16_nn_small") in kernels
    found = hip_device.expect(kernels, 2.0 * 128**3, 1.0)
    per_clock = 2048 if hip_device.architecture == "gfx942" else 512
    seconds = 2.0 * 128**3 / (per_clock * hip_device.compute_units * 1e9 * found.share)
    assert found.share < 1 and found.seconds == pytest.approx(seconds)


def test_sensors_are_those_of_the_busiest_gpu(tmp_path: Path) -> None:
    for card, watt, clock in (("card0", 9, 500), ("card1", 303, 2304)):
        device = tmp_path / "sys/class/drm" / card / "device"
        (device / "hwmon/hwmon4").mkdir(parents=True)
        (device / "pp_dpm_sclk").write_text(f"0: 500Mhz\n1: {clock}Mhz *\n")
        (device / "hwmon/hwmon4/power1_average").write_text(f"{watt}000000\n")
        (device / "hwmon/hwmon4/temp1_input").write_text("71000\n")
    assert read_sensors(tmp_path) == {"sclk_mhz": 2304.0, "watt": 303.0, "celsius": 71.0}
    assert read_sensors(tmp_path / "none") == {}
