"""Loads llvm_passes.c, with which a software driver compiles shaders in less time."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def build(compiler: str, library: Path, *sources: str | Path) -> bool:
    """Compile a shared library and return whether that worked."""
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", library, *sources, "-ldl"]
    return subprocess.run(command, capture_output=True).returncode == 0


def load(compiler: str | None, folder: Path) -> None:
    """Use the library in this process and in programs that it starts.

    Without a C compiler, and on other systems, the driver compiles shaders as it always does.
    """
    library = folder / "llvm_passes.so"
    if compiler and sys.platform.startswith("linux") and build(compiler, library, SOURCE):
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        os.environ["LD_PRELOAD"] = " ".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))
