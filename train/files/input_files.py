"""Opening the files that a user or a base model names: regular files only, without blocking, with one-line errors.

Opening a named pipe or a device could block forever; a folder, a name with a NUL or of 300 characters, or a missing
permission raise different exceptions. Here all of them become a WgradError that names the option and the path.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from wgrad.device.errors import WgradError

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
LONGEST_NAME = 255  # bytes; of ext4, APFS, NTFS and most others
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def expand_path(path: str | os.PathLike[str], source: str) -> str:
    """Replace a leading `~` or `~name` of a path by that home, as a shell does.

    Used for every option with a path, since a shell does not expand `--out=~/run`, and a YAML file has no shell.

    Raises:
        WgradError: no file can have that name; the error names `source` (the option).
    """
    _check_name(path, source)
    return os.path.expanduser(os.fspath(path))


@contextmanager
def reading(path: str | os.PathLike[str], source: str) -> Iterator[None]:
    """Turn errors of the operating system about `path` within the block into WgradError. source: the option."""
    try:
        yield
    except FileNotFoundError:
        raise WgradError(f"{source}: no such file: {_shown(path)}: check the path") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise WgradError(
            f"{source}: cannot read {_shown(path)}: {reason}: check the path and its permissions"
        ) from error
    except UnicodeEncodeError as error:
        raise WgradError(f"{source}: {_shown(path)} is no name of a file here: it is not Unicode text") from error


def one_line(text: str, limit: int = 200) -> str:
    """Make untrusted text fit for an error: printable, on one line, of bounded length."""
    text = " ".join(text.split())
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= limit else f"{text[: limit // 2]}...{text[-limit // 4 :]} ({len(text)} characters)"


def _shown(path: str | os.PathLike[str]) -> str:
    return one_line(os.fspath(path))


def exists(path: str | os.PathLike[str], source: str) -> bool:
    """Return whether a path exists. Raises WgradError if that cannot be known (no permission, a bad name)."""
    _check_name(path, source)
    with reading(path, source):
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def _check_name(path: str | os.PathLike[str], source: str) -> None:
    """Raise WgradError for a NUL, a part of more than 255 bytes, or a character that no name can have."""
    if "\0" in os.fspath(path):
        raise WgradError(f"{source}: {_shown(path)} has a NUL character: no file can have that name")
    try:
        longest = max(map(len, os.fsencode(path).split(os.fsencode(os.sep))))
    except UnicodeEncodeError as error:
        raise WgradError(f"{source}: {_shown(path)} is no name of a file here: it is not Unicode text") from error
    if longest > LONGEST_NAME:
        raise WgradError(
            f"{source}: a part of {_shown(path)} has {longest} bytes: a name must have at most {LONGEST_NAME}: "
            "shorten it"
        )


def open_input(path: str | os.PathLike[str], source: str) -> BufferedReader:
    """Open a regular file for binary reading, without blocking. source: the option that named it.

    Raises:
        WgradError: it does not exist, is not a regular file, may not be read, or has an impossible name.
    """
    _check_name(path, source)
    with reading(path, source):
        _check_regular(os.stat(path).st_mode, path, source)
        # Between the two calls a pipe may have replaced the file; O_NONBLOCK opens it without waiting.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        descriptor = os.open(path, flags)
        try:
            _check_regular(os.fstat(descriptor).st_mode, path, source)
            return os.fdopen(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise


def _check_regular(mode: int, path: str | os.PathLike[str], source: str) -> None:
    if not stat.S_ISREG(mode):
        kind = next((words for test, words in _KINDS if test(mode)), "no regular file")
        raise WgradError(f"{source}: {_shown(path)} is {kind}: give a regular file")


def refuse_lfs_pointer(start: bytes, path: str | os.PathLike[str], source: str) -> None:
    """Raise WgradError if a file that begins with `start` is a pointer of Git LFS."""
    if start.startswith(LFS_POINTER):
        raise WgradError(
            f"{source}: {_shown(path)} is a pointer of Git LFS, not the file itself: run 'git lfs pull' in "
            f"{Path(path).parent}"
        )


def read_input(path: str | os.PathLike[str], source: str, limit: int) -> bytes:
    """Return the contents of a regular file of at most `limit` bytes.

    Raises:
        WgradError: as `open_input`; the file is larger, or a pointer of Git LFS.
    """
    with open_input(path, source) as file, reading(path, source):
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > limit else file.read(limit + 1)  # it may have grown meanwhile
    if max(size, len(data)) > limit:
        raise WgradError(
            f"{source}: {_shown(path)} must have at most {limit} bytes; got {max(size, len(data))}: it is not what it "
            "is named as: check the path"
        )
    refuse_lfs_pointer(data, path, source)
    return data
