"""The output folder of a run: made, shown to be writable, and held against other runs before anything is loaded.

The lock is the operating system's, on OUT/.lock, so that it ends with the process, however that ends; on a file system
without locks the file itself is the lock. OUT/.lock.json says whose it is.
"""

from __future__ import annotations

import errno
import os
import socket
import time
import warnings
from pathlib import Path
from types import TracebackType

import filelock
import msgspec

from wgrad.device.errors import WgradError
from wgrad.device.files import make_folder, remove_leftovers, write_json, writing
from wgrad.train.files.decode import read_json

LOCK_FILE, HOLDER_FILE = ".lock", ".lock.json"
FORMAT = 1
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)  # what file systems say that have none


class _Holder(msgspec.Struct):
    """Whose a lock is."""

    pid: int
    host: str
    started: str
    format: int = FORMAT

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.started}"


class OutFolder:
    """A context manager. left_by: a run that ended without giving its lock back, in words; else None.

    Entering raises WgradError where another run has the folder, or nothing can be written into it. On leaving, a folder
    that was made here and into which nothing came goes again.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.left_by: str | None = None

    def __enter__(self) -> OutFolder:
        with writing(self.path):
            self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]
        make_folder(self.path)
        try:
            self._lock = self._acquire()
            try:
                holder = self._holder()
                self.left_by = str(holder) if holder else None
                remove_leftovers(self.path)
                self._sign()
            except BaseException:
                self._lock.release()
                raise
        except BaseException:
            self._remove_made()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._identities() == self._own:  # else the note is another's
            (self.path / HOLDER_FILE).unlink(missing_ok=True)
        self._lock.release()
        self._remove_made()

    def keep(self) -> bool:
        """Take the folder again where somebody has removed or moved it, or its lock -> whether that was so.

        WgradError where another run has it, or what lies there now is not the run's.
        """
        found = self._identities()
        if found == self._own:
            return False
        with writing(self.path):
            others = found[0] != self._own[0] and self.path.is_dir() and any(self.path.iterdir())
        if others:
            raise WgradError(
                f"--out: {self.path} is no longer the folder that the run began in, and is not empty: nothing more is "
                "written there. Find where the old one was moved to, put it back and go on with --resume"
            )
        self._lock.release(force=True)
        make_folder(self.path)
        self._lock = self._acquire()
        self._sign()
        return True

    def _sign(self) -> None:
        """Say whose the lock is, and note what was locked."""
        started = time.strftime("%Y-%m-%d %H:%M:%S %z")
        write_json(self.path / HOLDER_FILE, msgspec.to_builtins(_Holder(os.getpid(), _host(), started)))
        self._own = self._identities()

    def _identities(self) -> tuple[tuple[int, int] | None, ...]:
        """Identities of the folder and the lock file, each None where it is absent."""
        return tuple(map(identity_of, (self.path, self.path / LOCK_FILE)))

    def _acquire(self) -> filelock.BaseFileLock:
        path = self.path / LOCK_FILE
        with writing(self.path), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # filelock's, where it takes the file itself as the lock
            for kind in (filelock.FileLock, filelock.SoftFileLock):
                lock = kind(path, timeout=0)
                try:
                    lock.acquire()
                    return lock
                except filelock.Timeout:
                    raise self._in_use() from None
                except OSError as error:
                    if error.errno not in _NO_LOCKS or kind is filelock.SoftFileLock:
                        raise
        raise AssertionError("the last kind returns or raises")

    def _in_use(self) -> WgradError:
        holder = self._holder()
        return WgradError(
            f"--out: {self.path} is in use by another run ({holder or 'it does not say which'}): wait for its end, or "
            "choose another folder"
        )

    def _holder(self) -> _Holder | None:
        try:
            return read_json(self.path / HOLDER_FILE, _Holder, "--out")
        except WgradError:  # not there, or damaged: the lock itself does not hang on it
            return None

    def _remove_made(self) -> None:
        """The folders that were not there before, if nothing but the lock's file is in them."""
        if not self._made:
            return
        try:
            if [p.name for p in self.path.iterdir()] in ([], [LOCK_FILE]):
                (self.path / LOCK_FILE).unlink(missing_ok=True)
                for folder in self._made:
                    folder.rmdir()
        except OSError:
            pass


def holder_of(path: str | os.PathLike[str]) -> int | None:
    """Return the process on this machine whose run has the folder now, or None."""
    folder = Path(path)
    if not (folder / HOLDER_FILE).is_file() or not (folder / LOCK_FILE).exists():
        return None
    try:
        holder = read_json(folder / HOLDER_FILE, _Holder, "--out")
        with filelock.FileLock(folder / LOCK_FILE, timeout=0):  # nobody has it: its process is no more
            return None
    except filelock.Timeout:
        return holder.pid if holder.host == _host() else None
    except (WgradError, OSError):
        return None


def identity_of(path: Path) -> tuple[int, int] | None:
    """Return the identity of a file or folder (device and inode), or None."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _host() -> str:
    return socket.gethostname()
