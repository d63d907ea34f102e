"""How an error ends a command: what is said of it, on one line, and the exit status."""

from __future__ import annotations

import signal

from wgrad.device.errors import DeviceError, UnusableResult, WgradError

LONGEST_MESSAGE = 1000  # characters; what it quotes may be any file's
EXPECTED: tuple[type[BaseException], ...] = (WgradError, DeviceError)  # errors that are not ours to fix
SWEEP_INTERRUPTED = "interrupted: nothing is kept of a sweep: begin it anew"


def one_line(error: BaseException) -> str:
    """The message on one line, without control characters (of a name or a value that it quotes), of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    if len(text) <= LONGEST_MESSAGE:
        return text
    return f"{text[: LONGEST_MESSAGE // 2]} ... {text[-LONGEST_MESSAGE // 3 :]}"


def ending_of(error: BaseException) -> tuple[str, int] | None:
    """Message and exit status of an error that a user can be told of; None: a fault of ours, with a traceback."""
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
