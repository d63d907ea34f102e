"""Folders of the user's cache, and what is kept in them."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from wgrad.device.cache import cache_folder, keep


@pytest.mark.skipif(sys.platform != "linux", reason="the variables of Linux")
def test_folders_lie_where_the_system_keeps_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder("hip") == tmp_path / ".cache" / "wgrad" / "hip"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder("hip") == tmp_path / "x" / "wgrad" / "hip"
    assert not any(tmp_path.iterdir()), "asking makes nothing"


def test_what_is_kept_is_whole_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "kernel.xz"
    keep(path, b"old")
    keep(path, b"new")
    assert path.read_bytes() == b"new" and [p.name for p in path.parent.iterdir()] == ["kernel.xz"]


def test_a_full_disk_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path / "a", b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        keep(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_an_error_is_the_systems_own_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        keep(tmp_path / "file" / "x", b"1")
    (tmp_path / "folder" / "full").mkdir(parents=True)
    with pytest.raises(OSError):
        keep(tmp_path / "folder", b"1")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
