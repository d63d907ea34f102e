"""How an error ends a command: its message, on one line, and the exit status."""

from __future__ import annotations

import errno
import os
import signal

from wgrad.device.errors import DeviceError, UnusableResult, WgradError
from wgrad.train.terminal.output import OutputLost

LONGEST_MESSAGE = 1000  # characters; a message may quote any file
EXPECTED: tuple[type[BaseException], ...] = (WgradError, DeviceError)  # errors that are no faults of wgrad
SWEEP_INTERRUPTED = "interrupted: nothing is kept of a sweep: begin it anew"


def one_line(error: BaseException) -> str:
    """Return the message on one line of limited length, with control characters escaped."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    if len(text) <= LONGEST_MESSAGE:
        return text
    return f"{text[: LONGEST_MESSAGE // 2]} ... {text[-LONGEST_MESSAGE // 3 :]}"


# Refusals of the system that no fault of a program brings about.
_REFUSALS = {
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.ENFILE: "too many open files on this machine: end other programs",
    errno.EAGAIN: "too many processes: raise the limit (ulimit -u), or end other programs",
    errno.ENOMEM: "out of main memory",
    errno.EACCES: "permission denied: check the permissions of the path and its folders",
    errno.EPERM: "permission denied: check the permissions of the path and its folders",
    errno.EROFS: "the file system is read-only: choose another path",
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "your disk quota is used up: free some space",
    errno.EFBIG: "larger than the file system or the limit (ulimit -f) allows: choose another path",
    errno.EIO: "the disk cannot read or write it: check the disk",
    errno.ENAMETOOLONG: "the path is too long: choose a shorter one",
    errno.ELOOP: "the path has symbolic links without an end: choose another path",
}


def _refusal_of(error: BaseException) -> str:
    """Return the message for a refusal of the system that no command has named; "" for other errors."""
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":  # of `threading`
        return "the system starts no further thread: raise the limit (ulimit -u), or end other programs"
    if isinstance(error, FileNotFoundError) and error.filename is None:  # of os.getcwd
        return "the working folder has been removed: change to another one"
    if not isinstance(error, OSError) or isinstance(error, OutputLost) or error.errno not in _REFUSALS:
        return ""
    path = error.filename
    named = isinstance(path, (str, bytes, os.PathLike)) and error.errno not in (errno.EMFILE, errno.ENFILE)
    reason = _REFUSALS[error.errno]
    return one_line(OSError(f"{os.fsdecode(path)}: {reason}" if named else reason))


def ending_of(error: BaseException) -> tuple[str, int] | None:
    """Return message and exit status of an expected error; None: a fault of wgrad, which needs a traceback."""
    if isinstance(error, UnusableResult):
        return one_line(error), 1
    if isinstance(error, EXPECTED):
        return one_line(error), getattr(error, "status", 2)
    if isinstance(error, MemoryError):
        return "out of main memory", 2
    if refusal := _refusal_of(error):
        return refusal, 2
    if isinstance(error, KeyboardInterrupt):
        message = one_line(error) if str(error) else "interrupted"
        return message, 128 + getattr(error, "number", signal.SIGINT)
    return None
