"""`--device auto` and `--device hip` in processes of their own, with and without an emulated GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wgrad.autograd import select_device as dispatch
from wgrad.autograd.selftest.probe import chosen_cases
from wgrad.autograd.selftest.run import call_case

ARCHITECTURE = "gfx1100"
SELECT = """
import sys; sys.path[:] = {path!r}
from wgrad.autograd import select_device as dispatch
from wgrad.device.errors import DeviceUnavailable
{before}
try:
    device = dispatch.select_device({spec!r})
    print(device.name, "|", device.description, "|", device.reason)
except DeviceUnavailable as error:
    print("refused:", error)
"""

# The check has its first cases alone: that all pass, on both wave sizes, is in tests/hip/test_self_check.py.
CASES = 9
_FEW = f"from wgrad.autograd.selftest import probe as p; p.CASES, p.kernel_cases = p.CASES[:{CASES}], list; from wgrad"
FEW = f"from wgrad.autograd.selftest import probe; probe._CODE = probe._CODE.replace('from wgrad', {_FEW!r})"


def select(spec: str, before: str = "", **environment: str) -> str:
    """Return what a new process says of the device that it chooses."""
    kept = {k: v for k, v in os.environ.items() if k not in ("WGRAD_HIP_OBJECTS", "HIP_LAUNCH_BLOCKING")}
    code = SELECT.format(path=sys.path, before=before, spec=spec)
    options: dict[str, Any] = {"env": {**kept, **environment}, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", code], **options)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return line


@pytest.fixture
def card(emulator: Any, tmp_path: Path) -> dict[str, str]:
    """The environment of a process with an emulated GPU, of one wave size: the kernels do not matter here."""
    pytest.importorskip("rocm.bindings", reason="hip-python is not installed")
    return {
        "LD_LIBRARY_PATH": str(emulator.folder),
        "WGRAD_HIP_OBJECTS": str(emulator.folder),
        "WGRAD_EMULATED_ARCH": ARCHITECTURE,
        "XDG_CACHE_HOME": str(tmp_path),
    }


@pytest.fixture(scope="module")
def built(emulator: Any) -> None:
    """Build the kernels that the check needs, because its own process builds none."""
    dry = emulator.device(ARCHITECTURE).dry_run()
    for case in chosen_cases()[:CASES]:
        call_case(case, dry)
    for source in sorted({source for source, _ in dry.kernels}):
        emulator.build(source, ARCHITECTURE)


@pytest.mark.usefixtures("built")
def test_auto_takes_a_gpu_that_passes_and_remembers(card: dict[str, str], tmp_path: Path) -> None:
    name, description, reason = select("auto", FEW, **card).split(" | ")
    assert name == "hip" and reason == "the HIP GPU; its self-check passed"
    assert f"Emulated {ARCHITECTURE} ({ARCHITECTURE}, HIP" in description and "shipped kernels" in description
    assert len(list(tmp_path.glob("wgrad/hip/self-check-*.json"))) == 1
    # A check that would fail is not run again.
    assert select("auto", **{**card, "WGRAD_EMULATED_MEMORY": "4096"}).startswith("hip |")
    # One that is kept in another format is.
    (kept,) = tmp_path.glob("wgrad/hip/self-check-*.json")
    kept.write_text(kept.read_text().replace('"format": 1', '"format": 7'))
    assert not select("auto", FEW, **{**card, "WGRAD_EMULATED_MEMORY": "4096"}).startswith("hip |")


@pytest.mark.usefixtures("built")
def test_auto_leaves_a_gpu_that_fails(card: dict[str, str], tmp_path: Path) -> None:
    """Here: a GPU without memory. It goes on to the next device and says why, and keeps no verdict."""
    line = select("auto", FEW, **{**card, "WGRAD_EMULATED_MEMORY": "4096"})
    assert not line.startswith("hip") and "the self-check of Emulated" in line and "OutOfMemory" in line
    assert not list(tmp_path.glob("wgrad/hip/self-check-*"))


def test_by_name_there_is_no_check(card: dict[str, str], tmp_path: Path) -> None:
    line = select("hip", **card)
    assert line.startswith("hip | Emulated") and line.endswith("asked for by name")
    assert list(tmp_path.iterdir()) == []


def test_without_hip_python_one_line_says_so(tmp_path: Path) -> None:
    before = "sys.modules.update(rocm=None, hip=None)"
    line = select("hip", before, XDG_CACHE_HOME=str(tmp_path))
    assert line.startswith("refused: device hip: hip-python is not installed: pip install hip-python")
    assert "hip" not in select("auto", before, XDG_CACHE_HOME=str(tmp_path))
    before += "; dispatch._AMD_DRIVER = '/'"  # as where the kernel knows an AMD card
    assert "hip-python is not installed" in select("auto", before, XDG_CACHE_HOME=str(tmp_path))


def test_without_a_driver_one_line_says_so(emulator: Any, tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path), "LD_LIBRARY_PATH": ""}
    line = select("hip", **environment)
    assert line.startswith("refused: device hip: no HIP driver: hip-python is installed, but the runtime library")
    assert "hip" not in select("auto", **environment)
    assert "no HIP driver" in select("auto", "dispatch._AMD_DRIVER = '/'", **environment)


def test_without_a_gpu_one_line_says_so(card: dict[str, str]) -> None:
    line = select("hip", **{**card, "WGRAD_EMULATED_DEVICES": "0"})
    assert line.startswith("refused: device hip: the HIP driver finds no GPU")


def test_an_unsupported_gpu_is_left_with_the_reason(card: dict[str, str]) -> None:
    environment = {**card, "WGRAD_EMULATED_ARCH": "gfx803"}
    assert "gfx803, which is not supported" in select("hip", **environment)
    line = select("auto", **environment)
    assert not line.startswith("hip") and "gfx803, which is not supported" in line


def test_auto_of_this_process_leaves_the_emulated_gpu(emulator: Any) -> None:
    """Other tests ask for `auto` in the process that has the emulator."""
    emulator.device("gfx942")
    device: Any = dispatch.select_device("auto")
    assert device.name != "hip" and "an emulated card" in device.reason
