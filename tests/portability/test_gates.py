"""The copy of wgpu's library that is installed gives what the library refuses: on a driver with such a feature."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.portability.dawn import FETCHED
from tests.portability.gates import PLATFORMS, build, icd, lifts, run
from wgrad.wgsl.runtime import matrix_units


def test_the_installed_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, give_up: Any) -> None:
    source = matrix_units.installed()
    library = matrix_units.known(source) if source else None
    if source is None or library is None:
        pytest.skip("the installed wgpu is not a library that was tried")
    compiler = PLATFORMS[library.platform][1]
    if not FETCHED.exists() or shutil.which(compiler) is None:
        give_up("tests/portability/fetch_mesa.sh has not fetched lavapipe, or there is no C compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for header in ("webgpu.h", "wgpu.h"):
        shutil.copy(source.with_name(header), tmp_path)
    probe, environment = build(compiler, tmp_path), icd(tmp_path, FETCHED)
    said = [run(probe, path, environment=environment) for path in (source, matrix_units.write_copy())]
    assert lifts(*said), said
