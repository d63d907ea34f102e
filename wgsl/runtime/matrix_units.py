"""Tensor cores (WGSL's cooperative matrices): the copy of wgpu's library that allows them, and which GPUs passed.

wgpu-native lists the feature and refuses it at device creation, with everything else that it calls experimental
(gfx-rs/wgpu-native#516). `wgrad matrix-units enable` writes a private copy of the installed library into the user's
cache, with that one gate lifted (experimental_gate.py); nothing else is changed. wgpu-py loads the copy through its own
WGPU_LIB_PATH if a GPU has passed its check on it. This module does not import wgpu, because it runs before wgpu loads.
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
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any

from wgrad.device.cache import cache_folder, is_kept, keep, open_kept, read_kept
from wgrad.device.errors import DeviceError
from wgrad.wgsl.runtime.experimental_gate import Gate, find_gate

FEATURE = "cooperative-matrix"
# Metal's matrices are 8 x 8 x 8, which the kernels support (cooperative_text.py), but wgpu before version 30 does not
# offer them there with f16 operands and f32 sums (gfx-rs/wgpu#9629).
BACKENDS = ("Vulkan",)
_BESIDE = {"shader-f16", "subgroup"}  # other features that the kernels use
SWITCH = "WGRAD_MATRIX_UNITS"  # "off": never; "trial": also on a GPU that has not passed yet (the check itself)
_LIB_PATH = "WGPU_LIB_PATH"
_FORMAT = 1
_VERDICTS, _LICENSE = "cards.json", "LICENSE"
_MOST_VERDICTS = 1 << 20  # bytes
_ROOM = Path(__file__).parents[1]


def installed() -> Path | None:
    """The library that wgpu-py ships, whether or not it is the one in use."""
    found = importlib.util.find_spec("wgpu")
    if found is None or found.origin is None:
        return None
    return next(iter(sorted((Path(found.origin).parent / "resources").glob("*wgpu_native-release.*"))), None)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def gate_of(path: Path) -> Gate | None:
    """Return the gate of a library, or None where it is not found."""
    try:
        return find_gate(path.read_bytes())
    except (DeviceError, OSError):
        return None


def folder() -> Path:
    """Folder of the copy, its license and the verdicts."""
    return cache_folder("matrix-units")


def copy_path() -> Path:
    found = installed()
    return folder() / (found.name if found else "libwgpu_native-release")


def write_copy() -> Path:
    """Write the copy and wgpu's license. Raises DeviceError if the gate is not found, or writing fails."""
    source = installed()
    if source is None:
        raise DeviceError("matrix-units: wgpu is not installed, or without a library: pip install wgpu")
    data = source.read_bytes()
    try:
        gate = find_gate(data)
    except DeviceError as error:
        raise DeviceError(
            f"matrix-units: {source} (SHA-256 {hashlib.sha256(data).hexdigest()}) is left as it is, as {error}; "
            "training goes on without tensor cores"
        ) from error
    target = copy_path()
    try:
        if _open_copy() is None:  # Windows writes no file that is loaded
            keep(target, gate.lifted(data))
        keep(target.parent / _LICENSE, _license().encode())
    except OSError as error:
        raise DeviceError(f"matrix-units: cannot write {target}: {error.strerror or error}") from error
    if _open_copy() is None:
        raise DeviceError(f"matrix-units: {target} is not what was written: check the disk, then try again")
    return target


def _license() -> str:
    from importlib.metadata import files

    texts = [f.read_text(encoding="utf-8") for f in files("wgpu") or () if f.name.upper().startswith("LICEN")]
    head = (
        "wgpu-native (github.com/gfx-rs/wgpu-native): the MIT license or the Apache license 2.0, as its user chooses."
    )
    return "\n\n".join([head, "wgpu-py, which ships it:", *texts]) + "\n"


def remove() -> bool:
    """Delete everything that `write_copy` and `keep_verdict` wrote; return whether there was anything."""
    there = folder().exists()
    try:
        if there:
            shutil.rmtree(folder())
    except OSError as error:
        raise DeviceError(f"matrix-units: cannot remove {folder()}: {error.strerror or error}") from error
    return there


def copy_to_load() -> Path | None:
    """Return the path of the copy, if it matches the installed library and a GPU has passed its check."""
    if os.environ.get(SWITCH) == "off" or os.environ.get(_LIB_PATH, "").strip() or not _proven():
        return None
    file = _open_copy()
    if file is None:
        return None
    file.close()
    return copy_path()


def _open_copy() -> BufferedReader | None:
    """Open the copy, if it matches the installed library."""
    target = copy_path()
    try:
        source = installed()
        if source is None or not is_kept(target):
            return None
        data = source.read_bytes()
        whole = find_gate(data).lifted(data)
        file = open_kept(target)
        if file.read(len(whole) + 1) == whole:
            return file
        file.close()
    except (DeviceError, OSError):
        pass
    return None


@contextmanager
def using_copy() -> Iterator[bool]:
    """Have wgpu-py, imported within the block, load the copy, if there is one; yield whether it will.

    On Linux it loads the file that is open here, so that no other can take its place meanwhile.
    """
    unasked = os.environ.get(SWITCH) == "off" or os.environ.get(_LIB_PATH, "").strip() or "wgpu" in sys.modules
    file = None if unasked or not _proven() else _open_copy()
    if file is None:
        yield False
        return
    with file:
        opened = f"/proc/self/fd/{file.fileno()}"
        os.environ[_LIB_PATH] = opened if os.path.exists(opened) else str(copy_path())
        try:
            yield True
        finally:
            del os.environ[_LIB_PATH]  # child processes check for themselves


# ---- which cards passed ------------------------------------------------------------------------
def among(features: Collection[str]) -> bool:
    """Return whether the features of an adapter or a device include all that the tensor-core kernels need."""
    return _BESIDE | {FEATURE} <= set(features)


def identity(name: str, driver: str) -> str:
    """Key of a verdict: GPU and driver. A kernel that changed is checked before a run (autograd/selftest/verify.py)."""
    return f"{name}; {driver}"


@cache
def _kernels() -> str:
    """Digest of all shaders."""
    digest = hashlib.sha256()
    for shader in sorted(_ROOM.rglob("*.wgsl")):
        digest.update(shader.read_bytes())
    return digest.hexdigest()[:16]


def verdict(card: str) -> tuple[bool, str] | None:
    """(passed, reason) of a GPU by its `identity`; None if it was not tried, or failed with other kernels."""
    entry = _verdicts().get(card)
    if not isinstance(entry, dict) or not (entry.get("passed") or entry.get("kernels") == _kernels()):
        return None
    return bool(entry.get("passed")), str(entry.get("reason", ""))


def checked_lanes(card: str) -> int:
    """Lanes of a subgroup in the kernels of the check; 0 if unknown."""
    entry = _verdicts().get(card)
    lanes = entry.get("lanes") if isinstance(entry, dict) else 0
    return lanes if isinstance(lanes, int) else 0


def keep_verdict(card: str, passed: bool, reason: str, lanes: int = 0) -> None:
    """Save the verdict on a GPU. Raises DeviceError if it cannot be written."""
    cards = {**_verdicts(), card: {"passed": passed, "reason": reason, "lanes": lanes, "kernels": _kernels()}}
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


def _proven() -> bool:
    """Return whether a GPU passed its check on a copy, or this process is the check, which may crash."""
    return on_trial() or any(isinstance(entry, dict) and entry.get("passed") is True for entry in _verdicts().values())


def on_trial() -> bool:
    """Return whether this process is the check."""
    return os.environ.get(SWITCH) == "trial"


def may_ask(card: str) -> bool:
    """Return whether to request the feature: for GPUs that passed, whichever library offers it.

    A GPU without the kernels' matrix shape may accept the feature and leave sums at zero.
    """
    mode = os.environ.get(SWITCH, "")
    return mode != "off" and (on_trial() or (verdict(card) or (False,))[0])
