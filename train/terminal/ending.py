"""How an error ends a command: its message, on one line, and the exit status."""

from __future__ import annotations

import signal

from wgrad.device.errors import DeviceError, UnusableResult, WgradError

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


def ending_of(error: BaseException) -> tuple[str, int] | None:
    """Return message and exit status of an expected error; None: a fault of wgrad, which needs a traceback."""
    if isinstance(error, UnusableResult):
        return one_line(error), 1
    if isinstance(error, EXPECTED):
        return one_line(error), getattr(error, "status", 2)
    if isinstance(error, MemoryError):
        return "out of main memory", 2
    if isinstance(error, KeyboardInterrupt):
        message = one_line(error) if str(error) else "interrupted"
        return message, 128 + getattr(error, "number", signal.SIGINT)
    return None
