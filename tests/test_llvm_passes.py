"""The library that simplifies shaders before a software driver generates their code."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import llvm_passes
from tests.tools import C_COMPILER, c_compiler

PASSES = {  # what lavapipe asks for, optimization and the lack of it included: what runs
    b"default<O0>": b"function(simplifycfg),default<O0>",
    b"sroa,early-cse,simplifycfg,reassociate,mem2reg,instsimplify,instcombine": b"sroa,sccp,simplifycfg,early-cse,adce",
    b"mem2reg": b"mem2reg,sccp,simplifycfg,early-cse,adce",
    b"sroa,mem2reg": b"sroa,mem2reg",
}

LLVM = "const char *LLVMRunPasses(void *module, const char *passes, void *machine, void *options) { return passes; }"
DRIVER = """const char *LLVMRunPasses(void *, const char *, void *, void *);
const char *run(const char *passes) { const char *ran = LLVMRunPasses(0, passes, 0, 0); return ran; }"""

pytestmark = [C_COMPILER.needed, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="preloads a library")]


def test_a_driver_runs_other_passes_of_its_own_llvm(tmp_path: Path) -> None:
    """As a driver is opened: its symbols, and those of its LLVM, are not global."""
    for name, text in (("llvm", LLVM), ("driver", DRIVER)):
        (tmp_path / f"{name}.c").write_text(text)
    llvm, driver = tmp_path / "llvm.so", tmp_path / "driver.so"
    assert llvm_passes.build(str(c_compiler()), llvm, tmp_path / "llvm.c")
    assert llvm_passes.build(str(c_compiler()), driver, tmp_path / "driver.c", llvm)
    run = ctypes.CDLL(str(driver)).run
    run.restype = ctypes.c_char_p
    assert {passes: run(passes) for passes in PASSES} == PASSES


def test_programs_have_it_too() -> None:
    code = "import ctypes; ctypes.CDLL(None).LLVMRunPasses"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    without = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    assert subprocess.run([sys.executable, "-c", code], env=without, capture_output=True).returncode == 1


def test_a_compiler_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD")
    for compiler in (None, "false"):
        llvm_passes.load(compiler, tmp_path)
    assert "LD_PRELOAD" not in os.environ
