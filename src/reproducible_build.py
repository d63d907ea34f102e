"""Build backend: setuptools, with a wheel and an sdist that depend on the sources alone.

Archives hold their files in a fixed order, without owners, with mode 644 or 755, and with the time SOURCE_DATE_EPOCH
(seconds since 1970; by default the start of 1980, the earliest time that a zip file can store).
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  # the other hooks, as they are

_FIRST = 315532800  # 1980-01-01


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Build a reproducible wheel into `wheel_directory` and return its file name (PEP 517)."""
    name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    path = Path(wheel_directory, name)
    with zipfile.ZipFile(path) as old:
        files = [(info, old.read(info)) for info in old.infolist() if not info.is_dir()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        for info, data in files:  # the order is setuptools': that of names, .dist-info at the end
            packed = zipfile.ZipInfo(info.filename, time.gmtime(_epoch())[:6])
            packed.external_attr = (0o100000 | _mode(info.external_attr >> 16)) << 16
            packed.compress_type = zipfile.ZIP_DEFLATED
            packed.create_system = 3
            new.writestr(packed, data)
    return name


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """Build a reproducible source archive into `sdist_directory` and return its file name (PEP 517)."""
    name: str = build_meta.build_sdist(sdist_directory, config_settings)
    path = Path(sdist_directory, name)
    with tarfile.open(path) as old:
        members = sorted(old.getmembers(), key=lambda member: member.name)
        files = [(member, old.extractfile(member)) for member in members]
        content = [(member, file.read() if file else b"") for member, file in files]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member, data in content:
            info = tarfile.TarInfo(member.name)
            info.type, info.size, info.mtime = member.type, len(data), _epoch()
            info.mode = 0o755 if member.isdir() else _mode(member.mode)
            new.addfile(info, io.BytesIO(data))
    path.write_bytes(gzip.compress(packed.getvalue(), compresslevel=9, mtime=0))
    return name


def _epoch() -> int:
    return max(int(os.environ.get("SOURCE_DATE_EPOCH", _FIRST)), _FIRST)


def _mode(mode: int) -> int:
    return 0o755 if mode & 0o100 else 0o644
