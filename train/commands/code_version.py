"""The code that a report was made with: commit and digest."""

from __future__ import annotations

import hashlib
import os
import subprocess
from importlib import metadata
from pathlib import Path

import msgspec

import wgrad

_SUFFIXES = (".py", ".wgsl", ".hip", ".hpp", ".json")  # of files that decide which kernels run, and how
_SECONDS = 10.0  # for git
_DIGITS = 16


class _Vcs(msgspec.Struct):
    commit_id: str = ""


class _DirectUrl(msgspec.Struct):
    vcs_info: _Vcs = msgspec.field(default_factory=_Vcs)


def code_version(folder: Path | None = None) -> dict[str, str]:
    """Return the commit of the installed package, "" where it is not known, and the digest of its sources.

    A commit with another digest was changed after it was checked out.

    Args:
        folder: Of the package; None: of wgrad.
    """
    folder = folder or Path(str(wgrad.__file__)).parent
    return {"commit": _installed_commit() or _checked_out(folder), "sources": sources_digest(folder)}


def sources_digest(folder: Path) -> str:
    """Return the digest of a package's Python files, shaders and kernels, the same on every system."""
    digest = hashlib.sha256()
    files = [Path(at, name) for at, _, names in os.walk(folder, followlinks=True) for name in names]
    for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in files if path.suffix in _SUFFIXES):
        text = path.read_bytes().replace(b"\r\n", b"\n")  # git may write either
        digest.update(f"{name}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()[:_DIGITS]


def _installed_commit() -> str:
    """Return the commit that pip installed from a repository, or ""."""
    try:
        text = metadata.distribution("wgrad").read_text("direct_url.json")
        return msgspec.json.decode(text or "{}", type=_DirectUrl).vcs_info.commit_id
    except (metadata.PackageNotFoundError, OSError, msgspec.DecodeError, UnicodeDecodeError):
        return ""


def _checked_out(folder: Path) -> str:
    """Return the commit of the checkout that the package lies in, or ""."""
    # The second name fails where the package lies in a repository of something else, for example in its .venv.
    command = ["git", "-C", str(folder), "rev-parse", "HEAD", "HEAD:./__init__.py"]
    try:
        found = subprocess.run(command, capture_output=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.decode("ascii", "replace").split()[0] if found.returncode == 0 else ""
