"""The copy of wgpu's library that is installed gives what the library refuses: on a driver with such a feature."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.portability.dawn import FETCHED
from tests.portability.gates import build, icd, lifts, run
from tests.tools import C_COMPILER, MESA, c_compiler
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
