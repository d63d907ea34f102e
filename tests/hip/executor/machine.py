"""The C half of the executor (machine/*.c): built on first use, and what it shares with Python."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from enum import IntEnum
from functools import cache
from pathlib import Path

from tests.hip.executor.code_object import ExecutorError

COMPILER = "clang-19"
BUFFERS = 6  # of a wave: SCALARS ... ACCUMULATORS of machine.h
SCALARS, VECTORS, LDS, SCRATCH, ACCUMULATORS = 0, 1, 3, 4, 5
EXEC, PC, FIRST_VGPR = 126, 256, 256
# What an instruction carried out in C may say.
ERRORS = {
    1: "lanes 16-31 of a WMMA operand do not repeat lanes 0-15: RDNA3 needs A and B in both halves",
    2: "WMMA with lanes switched off",
    3: "a buffer descriptor with a stride or swizzle, which the executor does not model",
    4: "an access outside the work-group's LDS",
}
_FOLDER = Path(__file__).with_name("machine")
_FLAGS = ["-O2", "-march=x86-64-v3", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]


class Stop(IntEnum):
    """Why machine_run returned."""

    ENDED = 0
    BARRIER = 1
    COMPILE = 2
    FAULT = 3
    ERROR = 4
    LOST = 5


class Kind(IntEnum):
    """The kind of a compiled Entry."""

    EMULATED = 1
    BARRIER = 2
    OVERRIDE = 3


class Entry(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_void_p), ("kind", ctypes.c_int), ("arguments", ctypes.c_int),
        ("buffers", ctypes.c_int * BUFFERS), ("parameters", ctypes.c_void_p), ("executed", ctypes.c_uint64),
    ]  # fmt: skip


class Run(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_void_p), ("base", ctypes.c_uint64), ("words", ctypes.c_uint64), ("flush", ctypes.c_uint32),
        ("error", ctypes.c_uint32), ("fault", ctypes.c_uint64), ("executed", ctypes.c_uint64),
        ("trace", ctypes.c_void_p), ("traced", ctypes.c_uint64), ("room", ctypes.c_uint64),
    ]  # fmt: skip


def _integers(names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_int) for name in names.split()]


class Mfma(ctypes.Structure):
    _fields_ = _integers("to a b c to_accumulators a_accumulators b_accumulators type side depth flush")


class Wmma(ctypes.Structure):
    _fields_ = _integers("to a b c type")


class Buffer(ctypes.Structure):
    _fields_ = _integers(
        "data address descriptor offset_register offset by_address store bytes accumulators lanes size",
    )


class LdsLoad(ctypes.Structure):
    _fields_ = _integers("to address first second bytes is_signed size lanes accumulators")


class LdsStore(ctypes.Structure):
    _fields_ = _integers("data second_data address first second bytes size lanes")


class Dpp(ctypes.Structure):
    _fields_ = [
        ("plain", Entry), ("plain_pc", ctypes.c_uint64),
        *_integers("source borrowed lanes zero negate absolute"),
        ("lane", ctypes.c_int8 * 64), ("enabled", ctypes.c_uint8 * 64),
    ]  # fmt: skip


class Bpermute(ctypes.Structure):
    _fields_ = _integers("to address data offset lanes")


class Convert(ctypes.Structure):
    _fields_ = _integers("to from_ narrow lanes")


class PackHalves(ctypes.Structure):
    _fields_ = _integers("to low high lanes")


@cache
def library() -> ctypes.CDLL:
    """The compiled machine/*.c, kept in a folder of this user's under the system's for temporary files.

    Raises:
        ExecutorError: there is no compiler.
    """
    if shutil.which(COMPILER) is None:
        raise ExecutorError(f"{COMPILER} is not installed: apt-get install clang-19 lld-19 llvm-19")
    sources = sorted(_FOLDER.glob("*.c"))
    texts = b"".join(path.read_bytes() for path in (*sources, _FOLDER / "machine.h"))
    folder = Path(tempfile.gettempdir()) / f"wgrad-executor-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{hashlib.sha256(texts + ' '.join(_FLAGS).encode()).hexdigest()[:16]}.so"
    if not path.exists():
        made = path.with_suffix(f".{os.getpid()}")
        subprocess.run([COMPILER, *_FLAGS, *map(str, sources), "-o", str(made), "-lm"], check=True)
        made.replace(path)
    return ctypes.CDLL(str(path))


def address_of(function: str) -> int:
    """Return the address of a function of machine/*.c."""
    address = ctypes.cast(library()[function], ctypes.c_void_p).value
    assert address is not None
    return address
