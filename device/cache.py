"""Folders and files of the user's cache, which may be deleted at any time and are then recreated.

Files there are executed or trusted, so only those that this user has written are used: folders have mode 0700, and
neither they nor files are read if they belong to another user, or others could have written to them.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

from platformdirs import user_cache_path

from wgrad.device.files import replacing

_FLAGS = ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")  # those that this system has are used
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class NotPrivate(OSError):
    """Another user has made, or could have changed, a folder or file of the cache."""


def _root() -> Path:
    try:
        return user_cache_path("wgrad", appauthor=False, opinion=False)
    except RuntimeError:  # no $HOME, and no entry of this user in the system's list, as in some containers
        return Path(tempfile.gettempdir()) / f"wgrad-{os.geteuid()}"


def cache_folder(name: str) -> Path:
    """Return wgrad/`name` in the user's cache, which need not exist: $XDG_CACHE_HOME or ~/.cache on Linux,
    ~/Library/Caches on macOS, %LOCALAPPDATA% on Windows."""
    return _root() / name


def make_private(folder: Path) -> None:
    """Make a folder of the cache with mode 0700 if it is missing. Raises NotPrivate or another OSError."""
    levels = _levels(folder)
    levels[0].parent.mkdir(parents=True, exist_ok=True)
    for level in levels:
        with suppress(FileExistsError):
            level.mkdir(mode=0o700)
    check_private(folder)


def check_private(folder: Path) -> None:
    """Check that a folder is private, and set its mode to 0700. Raises NotPrivate or another OSError."""
    for level in _levels(folder):
        found = level.stat()
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(level))
        _check_owner(level.lstat(), level)  # the owner of a link, too
        _check_owner(found, level)
        if not hasattr(os, "geteuid"):  # Windows, where folders of a user are private
            continue
        mode = stat.S_IMODE(found.st_mode)
        others = _OTHERS if found.st_gid != found.st_uid else stat.S_IWOTH  # a user's own group has no other members
        if mode & others:
            raise NotPrivate(f"others may write to {level} (mode {mode:o}): remove it")
        if mode & 0o077:
            level.chmod(0o700)


def _levels(folder: Path) -> list[Path]:
    """Return the folders from the root of the cache down to this one."""
    root = _root()
    return [level for level in (*reversed(folder.parents), folder) if level.is_relative_to(root)] or [folder]


def _check_owner(found: os.stat_result, path: Path) -> None:
    if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
        raise NotPrivate(f"{path} belongs to another user (uid {found.st_uid}): remove it")


def open_kept(path: Path) -> BufferedReader:
    """Open a file of the cache for reading, without blocking or following a link.

    Raises:
        OSError: it is NotPrivate, not a regular file, or cannot be opened.
    """
    check_private(path.parent)
    number = os.open(path, os.O_RDONLY | sum(getattr(os, name, 0) for name in _FLAGS))
    try:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        _check_owner(found, path)
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_kept(path: Path, limit: int) -> bytes:
    """Return the contents of a file of the cache. Raises OSError as `open_kept`, or if it exceeds `limit` bytes."""
    with open_kept(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
    return data


def kept_paths(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the paths in a folder of the cache, sorted; none if it is missing or cannot be read."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def is_kept(path: Path) -> bool:
    """Return whether `open_kept` can open a file of the cache."""
    try:
        open_kept(path).close()
    except OSError:
        return False
    return True


def keep(path: Path, data: bytes) -> None:
    """Replace the contents of `path` atomically, making its folder if it is missing. Raises OSError."""
    make_private(path.parent)
    with replacing(path) as file:
        file.write(data)
