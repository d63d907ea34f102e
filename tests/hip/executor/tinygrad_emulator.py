"""tinygrad's emulator of AMD instructions, from a checkout outside of this repository.

    git clone https://github.com/tinygrad/tinygrad && git -C tinygrad checkout a9069c177a9da9cca18593edf55acd2e6073cca6
    export TINYGRAD_DIR=$PWD/tinygrad

It compiles each instruction into a function of the CPU, with clang. It is used by its internals, so by one commit.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.hip.executor.code_object import ExecutorError, disassembler
from tests.hip.executor.machine import COMPILER

COMMIT = "a9069c177a9da9cca18593edf55acd2e6073cca6"
CLONE = f"git clone https://github.com/tinygrad/tinygrad && git -C tinygrad checkout {COMMIT}"
_MODULE = "test.mockgpu.amd.emu"
_FAMILY = {"gfx90a": "cdna", "gfx942": "cdna", "gfx950": "cdna", "gfx1100": "rdna3", "gfx1201": "rdna4"}
ARCHITECTURES = tuple(_FAMILY)
_SUFFIX = re.compile(r"_(e32|e64|dpp|sdwa|e64_dpp)$")


def missing(architecture: str = "gfx942") -> str:
    """Return what the executor of an architecture lacks on this machine and how to get it; "" where it can run."""
    checkout = os.environ.get("TINYGRAD_DIR", "")
    if not (Path(checkout) / f"{_MODULE.replace('.', '/')}.py").is_file() or not checkout:
        return f"$TINYGRAD_DIR names no checkout of tinygrad: {CLONE}; export TINYGRAD_DIR=$PWD/tinygrad"
    objdump = disassembler(architecture)
    if not all(map(shutil.which, (COMPILER, objdump))):
        llvm = objdump.replace("-objdump", "")
        return f"{COMPILER} or {objdump} is not installed: apt-get install clang-19 lld-19 {llvm}"
    return ""


class Emulated(NamedTuple):
    """A compiled instruction. buffers: which of a wave's memories the function takes; name: as tinygrad decoded it;
    keep: what must live as long as the function is called."""

    address: int
    buffers: list[int]
    name: str
    keep: Any


@cache
def _module() -> Any:
    """test.mockgpu.amd.emu of the checkout."""
    if lacking := missing():
        raise ExecutorError(lacking)
    os.environ.setdefault("CC", COMPILER)  # its CPU backend calls it
    for name in [n for n in sys.modules if n == "test" or n.startswith("test.")]:
        del sys.modules[name]  # Python's own tests are a package of this name
    sys.path.insert(0, os.environ["TINYGRAD_DIR"])
    try:
        return importlib.import_module(_MODULE)
    finally:
        sys.path.remove(os.environ["TINYGRAD_DIR"])


def plain(name: str) -> str:
    """An instruction's name without what says how it is encoded; CDNA's v_fma_mix was v_mad_mix before gfx906."""
    return re.sub(r"^(v_accvgpr_\w+?)_b32$", r"\1", _SUFFIX.sub("", name)).replace("v_mad_mix", "v_fma_mix")


def compile_instruction(address: int, architecture: str) -> Emulated:
    """Compiles the instruction in memory at `address`.

    Raises:
        ExecutorError: $TINYGRAD_DIR or clang is missing.
    """
    module = _module()
    try:
        (program, runtime), decoded = module._decode_at(address, _FAMILY[architecture])
    except AttributeError as error:
        raise ExecutorError(f"$TINYGRAD_DIR is not at the commit that the executor knows: {CLONE} ({error})") from error
    function = ctypes.cast(runtime.fxn, ctypes.c_void_p).value
    assert function is not None
    name = module._op_name(decoded).lower()
    return Emulated(function, list(program.arg.globals), name, (program, runtime))
