"""Matrix units (WGSL's cooperative matrices): the copy of wgpu's library that grants them, and which cards passed.

wgpu-native lists the feature and refuses it at device creation, together with everything else that it calls
experimental (gfx-rs/wgpu-native#516). `wgrad matrix-units enable` writes a private copy of the installed library with
that one gate lifted into the user's cache, where the installed file is one of KNOWN; nothing else is ever changed. The
copy is loaded by wgpu-py's own WGPU_LIB_PATH. This module imports no wgpu: it is asked before wgpu is loaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from wgrad.device.cache import cache_folder, is_kept, keep, open_kept, read_kept
from wgrad.device.errors import DeviceError

FEATURE = "cooperative-matrix"
# Where cooperative matrices are of 16 x 16, as the kernels have them. Metal's are of 8 x 8, and wgpu before version 30
# has none there of f16 operands and f32 sums (gfx-rs/wgpu#9629).
BACKENDS = ("Vulkan",)
_BESIDE = {"shader-f16", "subgroup"}  # what the kernels use besides
SWITCH = "WGRAD_MATRIX_UNITS"  # "off": never; "trial": also on a card that has not passed yet (the check itself)
_LIB_PATH = "WGPU_LIB_PATH"
_FORMAT = 1
_VERDICTS, _LICENCE = "cards.json", "LICENSE"
_MOST_VERDICTS = 1 << 20  # bytes
_ROOM = Path(__file__).parents[1]


@dataclass(frozen=True)
class KnownLibrary:
    """A library that was tried: SHA-256 of the file, the bytes of its gate before and after, SHA-256 of the copy."""

    version: str  # of the Python package wgpu
    platform: str
    sha256: str
    offset: int
    before: bytes
    after: bytes
    copy_sha256: str


# The gate is wgpu_types' Features::all_experimental_mask(): made to return the empty set. What was tried of each: that
# it refuses an experimental feature as it is and gives it as a copy (tests/portability/gates.py); on a card, the first.
KNOWN = (
    KnownLibrary(
        "0.32.0",
        "Linux x86-64",
        "be0d8270dd9d78e1039eeb413ee21be8a89776a752e56d6b0f57eefbbc2d749c",
        7097376,
        bytes.fromhex("48b8000000"),  # movabs rax, the mask
        bytes.fromhex("31c031d2c3"),  # xor eax, eax; xor edx, edx; ret
        "601892ff457d023fd5a640bb0df17f3ca5e76847af181cc7154359ee2966a8e8",
    ),
    KnownLibrary(
        "0.32.0",
        "Linux aarch64",
        "51d8a711c9a687f824712c42a206800b69f14eff8667a88f2f86936cdef0ebd0",
        4764412,
        bytes.fromhex("2000c0d2 e1031faa e050e0f2"),  # mov and movk x0, the mask; mov x1, xzr; ret follows
        bytes.fromhex("000080d2 010080d2 c0035fd6"),  # mov x0, 0; mov x1, 0; ret
        "e12fc780ce192f2191042de27c45b10a9f708202a8afe58340e6e2d67db08da0",
    ),
    KnownLibrary(
        "0.32.0",
        "Windows x86-64",
        "5e26249c40dcdac43f5adca3195fcf40e4ec6c67472b38510165f411fcc198e7",
        6060176,
        bytes.fromhex("48b8000000"),
        bytes.fromhex("31c031d2c3"),
        "4c5674a31c45f2709b542ad03427511db7d404d57b3f27464825bd47f15b5fec",
    ),
)


def installed() -> Path | None:
    """The library that wgpu-py ships, whether or not it is the one in use."""
    found = importlib.util.find_spec("wgpu")
    if found is None or found.origin is None:
        return None
    return next(iter(sorted((Path(found.origin).parent / "resources").glob("*wgpu_native-release.*"))), None)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def known(path: Path) -> KnownLibrary | None:
    """The entry of KNOWN that this file is, byte for byte."""
    return _known(path.read_bytes())


def _known(data: bytes) -> KnownLibrary | None:
    digest = hashlib.sha256(data).hexdigest()
    return next((library for library in KNOWN if library.sha256 == digest), None)


def folder() -> Path:
    """Where the copy, its licence and the verdicts lie."""
    return cache_folder("matrix-units")


def copy_path() -> Path:
    found = installed()
    return folder() / (found.name if found else "libwgpu_native-release")


def lifted(library: KnownLibrary, data: bytes) -> bytes:
    """The bytes of a library with its gate lifted."""
    end = library.offset + len(library.before)
    assert data[library.offset : end] == library.before  # the digest says so
    return data[: library.offset] + library.after + data[end:]


def write_copy() -> Path:
    """Write the copy and wgpu's licence. DeviceError where the installed library is not a known one, or it cannot."""
    source = installed()
    if source is None:
        raise DeviceError("matrix-units: wgpu is not installed, or without a library: pip install wgpu")
    data = source.read_bytes()
    library = _known(data)
    if library is None:
        tried = ", ".join(f"wgpu {k.version} on {k.platform}" for k in KNOWN)
        raise DeviceError(
            f"matrix-units: {source} (SHA-256 {hashlib.sha256(data).hexdigest()}) is not a library that was tried "
            f"({tried}): it is left as it is, and products go on without matrix units"
        )
    target = copy_path()
    try:
        if _open_copy() is None:  # Windows writes no file that is loaded
            keep(target, lifted(library, data))
        keep(target.parent / _LICENCE, _licence().encode())
    except OSError as error:
        raise DeviceError(f"matrix-units: cannot write {target}: {error.strerror or error}") from error
    if _open_copy() is None:
        raise DeviceError(f"matrix-units: {target} is not what was written: check the disk, then try again")
    return target


def _licence() -> str:
    from importlib.metadata import files

    texts = [f.read_text(encoding="utf-8") for f in files("wgpu") or () if f.name.upper().startswith("LICEN")]
    head = (
        "wgpu-native (github.com/gfx-rs/wgpu-native): the MIT licence or the Apache licence 2.0, as its user chooses."
    )
    return "\n\n".join([head, "wgpu-py, which ships it:", *texts]) + "\n"


def remove() -> bool:
    """Delete everything that `write_copy` and `keep_verdict` wrote; -> whether there was anything."""
    there = folder().exists()
    try:
        if there:
            shutil.rmtree(folder())
    except OSError as error:
        raise DeviceError(f"matrix-units: cannot remove {folder()}: {error.strerror or error}") from error
    return there


def copy_to_load() -> Path | None:
    """The copy, where it is whole and of the library that is installed now."""
    if os.environ.get(SWITCH) == "off" or os.environ.get(_LIB_PATH, "").strip():
        return None
    file = _open_copy()
    if file is None:
        return None
    file.close()
    return copy_path()


def _open_copy() -> BufferedReader | None:
    """The copy, open, where it is whole and of the library that is installed now."""
    target = copy_path()
    try:
        source = installed()
        library = known(source) if source is not None and is_kept(target) else None
        if library is None:
            return None
        file = open_kept(target)
        if hashlib.file_digest(file, "sha256").hexdigest() == library.copy_sha256:
            return file
        file.close()
    except OSError:
        pass
    return None


@contextmanager
def using_copy() -> Iterator[bool]:
    """Have wgpu-py, which is to be imported within the block, load the copy where there is one; -> whether it will.

    On Linux it is given the file that is open here: another that takes its name meanwhile is not loaded.
    """
    unasked = os.environ.get(SWITCH) == "off" or os.environ.get(_LIB_PATH, "").strip() or "wgpu" in sys.modules
    file = None if unasked else _open_copy()
    if file is None:
        yield False
        return
    with file:
        opened = f"/proc/self/fd/{file.fileno()}"
        os.environ[_LIB_PATH] = opened if os.path.exists(opened) else str(copy_path())
        try:
            yield True
        finally:
            del os.environ[_LIB_PATH]  # processes that this one starts look for themselves


# ---- which cards passed ------------------------------------------------------------------------
def among(features: Collection[str]) -> bool:
    """Return whether these, of an adapter or a device, are all that the kernels for matrix units need."""
    return _BESIDE | {FEATURE} <= set(features)


def identity(name: str, driver: str) -> str:
    """Key of a verdict: GPU, driver, and the shaders (all: those of the units include others)."""
    digest = hashlib.sha256()
    for shader in sorted(_ROOM.rglob("*.wgsl")):
        digest.update(shader.read_bytes())
    return f"{name}; {driver}; kernels {digest.hexdigest()[:16]}"


def verdict(card: str) -> tuple[bool, str] | None:
    """(passed, reason) of a card by its `identity`; None where it was not tried."""
    entry = _verdicts().get(card)
    return (bool(entry.get("passed")), str(entry.get("reason", ""))) if isinstance(entry, dict) else None


def keep_verdict(card: str, passed: bool, reason: str) -> None:
    """DeviceError where it cannot be written."""
    cards = {**_verdicts(), card: {"passed": passed, "reason": reason}}
    path = folder() / _VERDICTS
    try:
        keep(path, (json.dumps({"format": _FORMAT, "cards": cards}, indent=2) + "\n").encode())
    except OSError as error:
        raise DeviceError(f"matrix-units: cannot write {path}: {error.strerror or error}") from error


def _verdicts() -> dict[str, Any]:
    try:
        kept = json.loads(read_kept(folder() / _VERDICTS, _MOST_VERDICTS))
        cards = kept["cards"] if kept["format"] == _FORMAT else {}
        return cards if isinstance(cards, dict) else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def may_ask(card: str) -> bool:
    """Return whether a device with the feature is asked for: by cards that passed, whichever library gives it. One
    without the shape that the kernels have need not refuse it: it may leave sums at zero."""
    mode = os.environ.get(SWITCH, "")
    return mode != "off" and (mode == "trial" or (verdict(card) or (False,))[0])
