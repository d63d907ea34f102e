"""Text for people and pipes: what a run says never ends it, whatever became of the terminal, pipe or log file.

A reader that has gone, a full disk behind `> log`, a closed descriptor or an encoding without the character would each
raise where something is printed, and lose what is trained.
"""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

STDOUT = "<stdout>"  # what Python calls it


class OutputLost(OSError):
    """Standard output takes no more: the reader has gone, the disk is full, ..."""


class Output:
    """sys.stdout (or sys.stderr) as it is at each call; what it cannot take is left out, and nothing is ever raised.

    A character that the encoding lacks is written as its escape (\\u2192).
    """

    def __init__(self, name: str = "stdout") -> None:
        self._name, self.name = name, f"<{name}>"

    @property
    def _stream(self) -> Any:
        stream = getattr(sys, self._name)  # None where the process was started without it
        return getattr(stream, "rich_proxied_file", stream)  # a bar that is shown puts a stream of its own in between

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        try:
            _write(self._stream, text)
        except (OSError, ValueError, AttributeError):  # ValueError: closed; AttributeError: None
            pass
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError, AttributeError):
            pass

    def isatty(self) -> bool:
        try:
            return bool(self._stream.isatty())
        except (OSError, ValueError, AttributeError):
            return False

    def fileno(self) -> int:
        """OSError where there is none, as for every stream: rich asks for it to learn the terminal's width."""
        try:
            return int(self._stream.fileno())
        except (ValueError, AttributeError) as error:
            raise OSError(f"{self._name} has no descriptor") from error


def _write(stream: Any, text: str) -> None:
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))


class _Strict:
    """A stream with the same escapes, whose errors are OutputLost, so that they can be told from all others.

    lost: the first of them, which `Output` keeps to itself. given_up: none matters any more.
    """

    def __init__(self, stream: Any) -> None:
        self._wrapped = stream
        self.lost: OutputLost | None = None
        self.given_up = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def write(self, text: str) -> int:
        try:
            _write(self._wrapped, text)
        except OSError as error:
            raise self._lose(error) from error
        return len(text)

    def flush(self) -> None:
        try:
            if not self.given_up:
                self._wrapped.flush()
        except OSError as error:
            raise self._lose(error) from error

    def _lose(self, error: OSError) -> OutputLost:
        found = OutputLost(error.errno, error.strerror)
        self.lost = self.lost or found
        return found


@contextmanager
def command_output() -> Iterator[None]:
    """sys.stdout of a command: raises OutputLost, at the block's end for text that `Output` could not write.

    After that the stream's buffer goes nowhere: Python would try once more at exit, and fail with a message of its own.
    """
    stream = sys.stdout
    if stream is None:
        yield
        return
    sys.stdout = strict = _Strict(stream)
    try:
        yield
        strict.flush()
        if strict.lost is not None and not strict.given_up:
            raise strict.lost
    except OutputLost:
        _discard(stream)
        raise
    finally:
        sys.stdout = stream


def settle() -> None:
    """Write what is left in standard output's buffer, or let it go: the command's end is then no error for it."""
    try:
        sys.stdout.flush()
    except OSError:
        _discard(sys.stdout)
    except (ValueError, AttributeError):  # closed, or None
        pass
    if isinstance(sys.stdout, _Strict):
        sys.stdout.given_up = True


def _discard(stream: Any) -> None:
    """Let what is left in the stream's buffer, and all that follows, go nowhere."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
    except (OSError, ValueError):  # no descriptor behind it: nothing is flushed at exit either
        pass


def harmless(text: str) -> str:
    """Text of a model or a file's name for a terminal, which obeys control characters: those as their escapes."""
    return "".join(ascii(c)[1:-1] if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def make_console(name: str = "stdout", terminal: bool | None = None, silent: bool = False) -> Console:
    """A rich console on `Output`. terminal: whether it is one, where that cannot be seen from here. silent: what is
    printed on it goes nowhere."""
    terminal = False if silent else terminal
    return Console(file=Output(name), highlight=False, force_terminal=terminal, quiet=silent)  # type: ignore[arg-type]


def say(text: str, name: str = "stdout") -> None:
    """Print a line for people, control characters in it as their escapes."""
    output = Output(name)
    output.write(harmless(text) + "\n")
    output.flush()
