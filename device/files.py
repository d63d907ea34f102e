"""Writing files atomically: write a temporary file next to the target, fsync, rename."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from wgrad.device.errors import CannotWrite, WgradError

TEMPORARY = ".partial"  # suffix of temporary files and folders, which may be deleted at any time

_BESIDE_SUFFIX = re.compile(rf"\.\d+\.[0-9a-f]{{8}}{re.escape(TEMPORARY)}(?=[/\\]|$)")  # of names from `_beside`

_REPLACE_TRIES = 20
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # of file systems that sync only files

_SHORT_WRITE = re.compile(r"\d+ requested and \d+ written")
_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space or choose another folder",
    errno.EDQUOT: "your disk quota is used up: free some space or choose another folder",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EACCES: "permission denied: choose a folder that you may write to",
    errno.EPERM: "permission denied: choose a folder that you may write to",
    errno.EFBIG: "larger than the file system or the limit (ulimit -f) allows: choose another folder",
    errno.ENOTDIR: "a part of the path is a file, not a folder: choose another folder",
    errno.EEXIST: "a file of that name is in the way: remove it or choose another folder",
    errno.ELOOP: "a symbolic link of that name is in the way: remove it or choose another folder",
    errno.EISDIR: "a folder of that name is in the way: remove it or choose another folder",
    errno.ENOENT: "no such folder: make it, or choose another folder",
}


@contextmanager
def writing(path: str | os.PathLike[str], option: str = "--out") -> Iterator[None]:
    """Turn an OSError within the block (disk full, no permission, ...) into a CannotWrite that names `path`, and the
    option for choosing another place.

    A file in a temporary folder is named by its final path.
    """
    try:
        yield
    except OSError as error:
        # NumPy's tofile, which the gguf package uses, only tells how much of an array was written.
        number = errno.ENOSPC if error.errno is None and _SHORT_WRITE.search(str(error)) else error.errno
        known = _ADVICE.get(number or 0)
        advice = f"{known} with {option}" if known else f"{error.strerror or error}: check the path given to {option}"
        raise CannotWrite(f"cannot write {_BESIDE_SUFFIX.sub('', os.fspath(path))}: {advice}") from error


def own_file(path: str, flags: int) -> int:
    """Open a file for writing, as an opener of `open`. OSError: it is no regular file, or a link to one."""
    number = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    return number


def read_small(path: str | os.PathLike[str], limit: int = 1 << 20) -> str:
    """Return the text of a small file of the system, without blanks around it; "": it cannot be read as one.

    Args:
        limit: Bytes that are read. A variable may name any file: a pipe or a device would have no end.
    """
    try:
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(number, "rb") as file:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                return ""
            return file.read(limit).decode("utf-8", "replace").strip()
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return ""


def names_in(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names in a folder; none if it is missing or cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def make_folder(path: str | os.PathLike[str]) -> Path:
    """Create a folder and its missing parents. Raises WgradError if that is impossible."""
    with writing(path):
        missing = [p for p in (Path(path), *Path(path).parents) if not p.exists()]
        Path(path).mkdir(parents=True, exist_ok=True)
        for made in missing:
            _sync_folder(made.parent)
    return Path(path)


def _sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    if os.name == "nt":  # Windows cannot open a folder; its rename is journaled anyway
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def _refuse_special(target: Path, option: str) -> None:
    """Raise if the target is /dev/null, a pipe or a folder, which renaming would replace (as root)."""
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if target.exists() and not target.is_file():
        raise WgradError(f"cannot write {target}: it is no regular file: give another name with {option}")


def _replace(source: Path, target: Path) -> None:
    """Rename a file; on Windows retry for a second if another program (a virus scanner) has it open."""
    for attempt in range(_REPLACE_TRIES):
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if os.name != "nt" or attempt == _REPLACE_TRIES - 1:
                raise
            time.sleep(1 / _REPLACE_TRIES)


def remove_folder(path: Path) -> None:
    """Remove a folder, atomically for other processes. Files that cannot be removed stay, silently."""
    if not os.path.exists(path):
        return
    beside = _beside(path)
    try:
        path.rename(beside)
    except OSError:  # in use, on Windows
        beside = path
    shutil.rmtree(beside, ignore_errors=True)


def _beside(target: Path) -> Path:
    """Return a unique name next to the target. Files are opened with "x", so that no link is followed."""
    return target.with_name(f"{target.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY}")


@contextmanager
def replacing(target: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a temporary file for writing; it replaces `target` if the block succeeds, else it is removed.

    After an OSError `target` is unchanged.
    """
    beside = _beside(target)
    try:
        text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
        with open(beside, mode.replace("w", "x"), **text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _replace(beside, target)
        _sync_folder(target.parent)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def atomic_file(path: str | os.PathLike[str], mode: str = "wb", option: str = "--out") -> Iterator[IO[Any]]:
    """Write a file like `replacing`; raises WgradError if the disk is full, the folder is read-only, and so on."""
    target = Path(path)
    with writing(target, option):
        _refuse_special(target, option)
        with replacing(target, mode) as file:
            yield file


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty temporary folder; if the block succeeds, its contents are fsynced and it becomes `path`.

    `path` must not exist as a non-empty folder. Raises WgradError as `atomic_file` does, and then leaves nothing.
    """
    target = Path(path)
    beside = _beside(target)
    with writing(target):
        try:
            beside.mkdir(parents=True)
            yield beside
            for folder, _, names in os.walk(beside, topdown=False):
                for name in names:
                    with open(Path(folder, name), "rb+") as file:
                        os.fsync(file.fileno())
                _sync_folder(Path(folder))
            _replace(beside, target)
            _sync_folder(target.parent)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def check_writable(path: str | os.PathLike[str], option: str) -> None:
    """Raise WgradError, naming the option, if a file could not be written; call this before long work."""
    target = Path(path)
    with writing(target, option):
        _refuse_special(target, option)
        beside = _beside(target)
        try:
            beside.touch(exist_ok=False)
        finally:
            beside.unlink(missing_ok=True)


def write_bytes(path: str | os.PathLike[str], data: bytes, option: str = "--out") -> None:
    """Replace the contents of `path` atomically. option: as in `writing`."""
    with atomic_file(path, option=option) as file:
        file.write(data)


def write_text(path: str | os.PathLike[str], text: str, option: str = "--out") -> None:
    """Replace the contents of `path` atomically, in UTF-8; half a surrogate pair (from a file name) is escaped.

    option: as in `writing`.
    """
    write_bytes(path, text.encode("utf-8", "backslashreplace"), option)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Replace `path` atomically with `value` as JSON, indent 2. Raises ValueError for NaN, which JSON lacks."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def remove_leftovers(folder: str | os.PathLike[str]) -> None:
    """Delete the temporary files that a killed process left in `folder`. Those that cannot be removed stay."""
    with suppress(OSError):
        for path in sorted(Path(folder).glob(f"*.[0-9]*{TEMPORARY}")):
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def free_bytes(path: str | os.PathLike[str]) -> int | None:
    """Return the free bytes on the disk of a path, which need not exist; None if the system does not tell."""
    with writing(path):
        parent = next(folder for folder in (Path(path), *Path(path).absolute().parents) if folder.exists())
        usage = shutil.disk_usage(parent)
    return usage.free if usage.total else None
