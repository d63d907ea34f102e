"""Child processes of Python in which a driver may crash or hang."""

from __future__ import annotations

import math
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from wgrad.device import bounded

T = TypeVar("T")
_END = 5.0  # seconds for a killed process; one that waits inside its driver does not end
_JOIN = 1.0  # for its last lines; a process of the driver may hold the pipes open


class Silent(Exception):
    """A child said nothing for too long."""


class Child:
    """A process that runs `code`, and its lines.

    environment: the variables of the process.
    errors: the lines of stderr so far.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, code: str, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            encoding="utf-8",
            errors="replace",
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=_read, args=(self._process.stdout, self._lines.put), daemon=True),
            threading.Thread(target=_read, args=(self._process.stderr, self._error), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _error(self, line: str | None) -> None:
        if line:
            self.errors.append(line)

    def line(self, seconds: float) -> str | None:
        """Return the next line of stdout, None at its end. Raises Silent."""
        return _within(seconds, lambda look: self._lines.get(timeout=look), queue.Empty)

    def status(self, seconds: float) -> int:
        """Wait for the end of the process and return its status. Raises Silent."""
        return _within(seconds, lambda look: self._process.wait(look), subprocess.TimeoutExpired)

    def end(self) -> None:
        """Kill the process, if it still runs, and read its last lines."""
        with suppress(OSError):
            self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END)
        for reader in self._readers:
            reader.join(_JOIN)


def _within(seconds: float, look_once: Callable[[float], T], late: type[Exception]) -> T:
    """Return the result of the first look that is not late. Looks are counted, not the clock's seconds: both processes
    may have been stopped for a while."""
    look = min(bounded.LOOK, seconds)
    for _ in range(math.ceil(seconds / look)):
        with suppress(late):
            return look_once(look)
    raise Silent


def _read(pipe: Any, take: Callable[[str | None], None]) -> None:
    with suppress(ValueError, OSError):
        for line in pipe:
            take(line.rstrip("\n"))
    take(None)
