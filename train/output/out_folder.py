"""The output folder of a run: created, checked for write access, and locked before anything is loaded.

The lock is one of the operating system, on OUT/.lock, which ends with the process. On a file system without locks, the
file itself is the lock. OUT/.lock.json names the holder.
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
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)  # errors of file systems without locks


class _Holder(msgspec.Struct):
    """Holder of a lock."""

    pid: int
    host: str
    started: str
    format: int = FORMAT

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.started}"


class OutFolder:
    """Context manager that creates and locks an output folder. A folder that stays empty is removed on leaving.

    Entering raises WgradError if another run holds the folder, or it is not writable.

    Attributes:
        left_by: Description of a run that ended without releasing its lock; None: there was none.
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
        if self._identities() == self._own:  # else the file belongs to another run
            (self.path / HOLDER_FILE).unlink(missing_ok=True)
        self._lock.release()
        self._remove_made()

    def keep(self) -> bool:
        """Lock the folder again if somebody has removed or moved it, or its lock, and return whether that was so.

        Raises:
            WgradError: Another run holds it, or it now is another folder with files in it.
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
        """Write the holder of the lock, and remember which files were locked."""
        started = time.strftime("%Y-%m-%d %H:%M:%S %z")
        write_json(self.path / HOLDER_FILE, msgspec.to_builtins(_Holder(os.getpid(), _host(), started)))
        self._own = self._identities()

    def _identities(self) -> tuple[tuple[int, int] | None, ...]:
        """Return the identities of the folder and the lock file; None: it is missing."""
        return tuple(map(identity_of, (self.path, self.path / LOCK_FILE)))

    def _acquire(self) -> filelock.BaseFileLock:
        path = self.path / LOCK_FILE
        with writing(self.path), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # filelock warns when it uses the file itself as the lock
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
        except WgradError:  # missing or damaged: the lock itself does not depend on it
            return None

    def _remove_made(self) -> None:
        """Remove the folders that were created here, if they hold nothing but the lock file."""
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
    """Return the id of the process on this machine whose run holds a folder; None: there is none."""
    folder = Path(path)
    if not os.path.isfile(folder / HOLDER_FILE) or not os.path.exists(folder / LOCK_FILE):
        return None
    try:
        holder = read_json(folder / HOLDER_FILE, _Holder, "--out")
        with filelock.FileLock(folder / LOCK_FILE, timeout=0):  # it is free: its process has ended
            return None
    except filelock.Timeout:
        return holder.pid if holder.host == _host() else None
    except (WgradError, OSError):
        return None


def identity_of(path: Path) -> tuple[int, int] | None:
    """Return the identity of a file or folder (device and inode); None: it is missing."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _host() -> str:
    return socket.gethostname()
