"""The copy of wgpu's library that is installed gives what the library refuses: on a driver with such a feature."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.portability import gates
from tests.portability.dawn import FETCHED
from tests.portability.gates import build, icd, lifts, run
from tests.tools import C_COMPILER, MESA, c_compiler
from tests.wgsl.test_matrix_units import GATE_X86, library_of
from wgrad.wgsl.runtime import matrix_units


@MESA.needed
def test_the_copy_lifts_the_gate_of_the_installed_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = matrix_units.installed()
    if source is None or matrix_units.gate_of(source) is None:
        pytest.skip("the installed wgpu is a library whose gate is not found")
    C_COMPILER.require()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for header in ("webgpu.h", "wgpu.h"):
        shutil.copy(source.with_name(header), tmp_path)
    probe, environment = build(str(c_compiler()), tmp_path), icd(tmp_path, FETCHED)
    said = [run(probe, path, environment=environment) for path in (source, matrix_units.write_copy())]
    assert lifts(*said), said


def test_a_release_whose_gate_is_not_clear_gives_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gates, "library", lambda version, *_: library_of("x86-64", *[GATE_X86] * int(version)))
    assert gates.find(["1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(gates.PLATFORMS) + 1 and lines[-1] == "wgpu 1, Windows aarch64: at 0x100"
    for versions in (["2", "1"], ["1", "2"], ["0"]):
        assert gates.find(versions) == 1
    assert "wgpu 2, Windows aarch64: its code has 2 places that could be" in capsys.readouterr().out
