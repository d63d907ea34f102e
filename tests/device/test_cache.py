"""Folders of the user's cache, and what is kept in them."""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
from pathlib import Path

import pytest

from wgrad.device import cache as cache_module
from wgrad.device.cache import NotPrivate, cache_folder, is_kept, keep, kept_paths, make_private, read_kept


@pytest.mark.skipif(sys.platform != "linux", reason="the variables of Linux")
def test_folders_lie_where_the_system_keeps_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder("hip") == tmp_path / ".cache" / "wgrad" / "hip"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder("hip") == tmp_path / "x" / "wgrad" / "hip"
    assert not any(tmp_path.iterdir()), "asking makes nothing"


def test_without_a_home_the_cache_is_among_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user may have no $HOME, and no entry in the system's list of users."""

    def no_home(*given: object, **named: object) -> None:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr(cache_module, "user_cache_path", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    keep(cache_folder("a") / "b", b"c")
    assert read_kept(cache_folder("a") / "b", 9) == b"c"
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("wgrad-") and stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_cache_that_cannot_be_listed_is_empty(tmp_path: Path) -> None:
    (tmp_path / "b.x").touch()
    (tmp_path / "a.x").touch()
    assert [path.name for path in kept_paths(tmp_path, "*.x")] == ["a.x", "b.x"]
    assert kept_paths(tmp_path / ("x" * 300)) == []


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


# ---- whose it is -------------------------------------------------------------------------------
posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners and modes here")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the cache, not made yet."""
    for name in ("XDG_CACHE_HOME", "HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    return cache_folder("x")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@posix
def test_folders_are_the_users_alone(cache: Path) -> None:
    """Those that an earlier version made for all to read become so too."""
    keep(cache / "a", b"1")
    assert mode(cache) == mode(cache.parent) == 0o700
    cache.chmod(0o755)
    cache.parent.chmod(0o755)
    assert read_kept(cache / "a", 9) == b"1"
    assert mode(cache) == mode(cache.parent) == 0o700


@posix
@pytest.mark.parametrize("level", [0, 1])
def test_a_folder_that_others_may_write_to_is_not_used(level: int, cache: Path) -> None:
    keep(cache / "a", b"1")
    (cache, cache.parent)[level].chmod(0o777)
    with pytest.raises(NotPrivate, match=r"others may write to .* \(mode 777\): remove it"):
        keep(cache / "a", b"2")
    with pytest.raises(NotPrivate):
        read_kept(cache / "a", 9)
    with pytest.raises(NotPrivate):
        make_private(cache / "deeper")
    assert not is_kept(cache / "a") and (cache / "a").read_bytes() == b"1"


@posix
@pytest.mark.skipif(getattr(os, "geteuid", int)() != 0, reason="only root gives a folder to any group")
def test_a_group_may_write_where_it_is_the_users_own(cache: Path) -> None:
    """Some systems give each user a group of the same number, and folders that the group may write to."""
    keep(cache / "a", b"1")
    os.chown(cache, -1, os.geteuid())
    cache.chmod(0o770)
    assert read_kept(cache / "a", 9) == b"1" and mode(cache) == 0o700
    os.chown(cache, -1, 12345)
    cache.chmod(0o770)
    with pytest.raises(NotPrivate, match="mode 770"):
        read_kept(cache / "a", 9)


@posix
@pytest.mark.skipif(getattr(os, "geteuid", int)() != 0, reason="only root makes a file of another user")
@pytest.mark.parametrize("what", ["file", "folder", "root", "link", "end of a link"])
def test_what_another_user_has_made_is_not_used(what: str, cache: Path, tmp_path: Path) -> None:
    keep(cache / "a", b"1")
    if "link" in what:
        cache.rename(tmp_path / "elsewhere")
        cache.symlink_to(tmp_path / "elsewhere")
    chosen = {"file": cache / "a", "folder": cache, "root": cache.parent, "link": cache}.get(
        what, tmp_path / "elsewhere"
    )
    os.chown(chosen, 12345, 12345, follow_symlinks=False)
    with pytest.raises(NotPrivate, match=r"belongs to another user \(uid 12345\)"):
        read_kept(cache / "a", 9)
    if what != "file":
        with pytest.raises(NotPrivate):
            keep(cache / "a", b"2")


def test_a_users_own_link_to_another_disk_is_followed(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    cache.parent.mkdir(parents=True)
    cache.symlink_to(tmp_path / "large")
    keep(cache / "a", b"1")
    assert read_kept(tmp_path / "large" / "a", 9) == b"1"


@posix
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "large", "absent"])
def test_only_regular_files_of_a_bounded_size_are_read(kind: str, cache: Path, tmp_path: Path) -> None:
    make_private(cache)
    (tmp_path / "other").write_bytes(b"1")
    if kind == "link":
        (cache / "a").symlink_to(tmp_path / "other")
    elif kind == "pipe":  # opened for reading, it would be waited for
        os.mkfifo(cache / "a")
    elif kind == "folder":
        (cache / "a").mkdir()
    elif kind == "large":
        (cache / "a").write_bytes(b"0123456789")
    with pytest.raises(OSError):
        read_kept(cache / "a", 9)


def test_a_link_in_the_place_of_a_kept_file_is_replaced(cache: Path, tmp_path: Path) -> None:
    make_private(cache)
    (tmp_path / "other").write_bytes(b"1")
    (cache / "a").symlink_to(tmp_path / "other")
    keep(cache / "a", b"2")
    assert (tmp_path / "other").read_bytes() == b"1" and (cache / "a").read_bytes() == b"2"


def test_tests_have_a_cache_of_their_own() -> None:
    """A user's own cache changes no test (tests/conftest.py)."""
    assert not cache_folder("hip").is_relative_to(Path.home() / ".cache")
