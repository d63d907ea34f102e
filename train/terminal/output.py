"""Output that never ends a run, whatever happens to the terminal, pipe or log file.

A closed pipe, a full disk behind `> log`, a closed descriptor, or an encoding that lacks a character would otherwise
raise while printing, and lose the training.
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

STDOUT = "<stdout>"  # Python's name for it


class OutputLost(OSError):
    """Standard output cannot be written: its reader has gone, the disk is full, ..."""


class Output:
    """Writes to the current sys.stdout (or sys.stderr) and ignores errors.

    Characters that the encoding lacks are escaped (\\u2192).
    """

    def __init__(self, name: str = "stdout") -> None:
        self._name, self.name = name, f"<{name}>"

    @property
    def _stream(self) -> Any:
        stream = getattr(sys, self._name)  # None if the process was started without it
        return getattr(stream, "rich_proxied_file", stream)  # a visible progress bar replaces it by its own stream

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
        """Return the descriptor, which rich needs for the terminal's width. OSError: there is none."""
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
    """A stream that raises OutputLost, to distinguish its errors from all others, and escapes like `Output`.

    Attributes:
        lost: The first error, which `Output` ignores.
        given_up: Whether errors no longer matter.
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
    """Let sys.stdout raise OutputLost in the block, and at its end if `Output` could not write.

    Afterwards the stream's buffer is discarded: Python would try to flush it at exit, and print its own error.
    """
    stream = sys.stdout
    if stream is None:  # the process was started without it: what is printed is lost, as Python's `print` has it
        with open(os.devnull, "w", encoding="utf-8") as sys.stdout:
            try:
                yield
            finally:
                sys.stdout = None
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
    """Flush standard output, or discard its buffer, so that lost output is no error of the command."""
    try:
        sys.stdout.flush()
    except OSError:
        _discard(sys.stdout)
    except (ValueError, AttributeError):  # closed, or None
        pass
    if isinstance(sys.stdout, _Strict):
        sys.stdout.given_up = True


def _discard(stream: Any) -> None:
    """Discard a stream's buffer and all later output."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
    except (OSError, ValueError):  # it has no descriptor: nothing is flushed at exit either
        pass


def harmless(text: str) -> str:
    """Escape control characters, which a terminal would obey, in a model's text or a file's name."""
    return "".join(ascii(c)[1:-1] if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def make_console(name: str = "stdout", terminal: bool | None = None, silent: bool = False) -> Console:
    """Return a rich console that writes to `Output`.

    Args:
        name: "stdout" or "stderr".
        terminal: Whether it is a terminal; None: detect it.
        silent: Whether to print nothing.
    """
    terminal = False if silent else terminal
    # rich cannot read every text that it takes for a number, such as 5,000 digits or a superscript.
    sizes = {key for key in ("COLUMNS", "LINES") if not re.fullmatch("[1-9][0-9]{0,3}", os.environ.get(key, "1"))}
    variables = {key: value for key, value in os.environ.items() if key not in sizes}
    return Console(
        file=Output(name),  # type: ignore[arg-type]
        highlight=False,
        force_terminal=terminal,
        quiet=silent,
        _environ=variables,
    )


def say(text: str, name: str = "stdout") -> None:
    """Print a line for people, with control characters escaped."""
    output = Output(name)
    output.write(harmless(text) + "\n")
    output.flush()


def say_ending(message: str, status: int) -> None:
    """Print why a command ends with this exit status, after all that it has printed. Above 128 it was interrupted."""
    Output().flush()
    say(f"wgrad: {message}" if status > 128 else f"wgrad: error: {message}", "stderr")
