"""Opening the files that a person or a base model names: regular files only, never waiting, each error one line.

A named pipe or a device in the place of a file would be waited for without end; a folder, a name with a NUL or of 300
characters, a missing permission are errors of the operating system in as many classes. All of them come out of here
as a WgradError that names the option and the path.
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
    """The path with a leading `~` or `~name` replaced by that home, as a shell does. Every option of a path goes
    through here (a shell expands none in `--out=~/run`, and a YAML file has no shell).

    WgradError, naming `source` (the option): a name that no file can have, for reading or for writing.
    """
    _check_name(path, source)
    return os.path.expanduser(os.fspath(path))


@contextmanager
def reading(path: str | os.PathLike[str], source: str) -> Iterator[None]:
    """Turn what the operating system says of `path` within the block into a WgradError. source: the option."""
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
    """Text of other people for a message: printable, on one line, of bounded length."""
    text = " ".join(text.split())
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= limit else f"{text[: limit // 2]}...{text[-limit // 4 :]} ({len(text)} characters)"


def _shown(path: str | os.PathLike[str]) -> str:
    return one_line(os.fspath(path))


def exists(path: str | os.PathLike[str], source: str) -> bool:
    """Return whether there is anything of that name. WgradError where that cannot be known (no permission, a bad
    name)."""
    _check_name(path, source)
    with reading(path, source):
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def _check_name(path: str | os.PathLike[str], source: str) -> None:
    """WgradError: a NUL, a part of more than 255 bytes, a character that no name can have here."""
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
    """Open a regular file for reading, binary. source: the option that named it.

    Raises WgradError without waiting: not there, not a regular file, no permission, a name that no file can have.
    """
    _check_name(path, source)
    with reading(path, source):
        _check_regular(os.stat(path).st_mode, path, source)
        # Between the two calls a pipe may have taken its place: opened so, it is not waited for either.
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
    """WgradError where `start`, the first bytes of a file, is that of a pointer which Git LFS left in its place."""
    if start.startswith(LFS_POINTER):
        raise WgradError(
            f"{source}: {_shown(path)} is a pointer of Git LFS, not the file itself: run 'git lfs pull' in "
            f"{Path(path).parent}"
        )


def read_input(path: str | os.PathLike[str], source: str, limit: int) -> bytes:
    """The contents of a regular file of at most `limit` bytes. WgradError as `open_input`, and where it is larger or a
    pointer of Git LFS."""
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
