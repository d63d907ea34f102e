"""Commands of wgrad in child processes, so that a lost device or a crash does not end the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from wgrad.device.errors import WgradError
from wgrad.train.files.input_files import open_input

_CODE = "import sys; sys.path[:] = {path!r}; from wgrad.train.commands.cli import main; sys.exit(main(sys.argv[1:]))"
# Ends the command when the process at the other end of its standard input ends, for any reason.
_FOLLOWING = (
    "import os, signal, threading; "
    "end = lambda: (os.read(0, 1), os.kill(os.getpid(), signal.SIGTERM)); "
    "threading.Thread(target=end, daemon=True).start(); "
)
_KEPT_LINES = 400
_END_SECONDS = 10.0
ERROR = "wgrad: error: "


def start(words: Sequence[str], apart: bool = False, **options: Any) -> subprocess.Popen[bytes]:
    """Start `wgrad WORDS`.

    Args:
        words: Command and options.
        apart: The command continues when this process, or the terminal, ends; else it ends with this process.
        options: Further arguments of Popen.

    Raises:
        WgradError: it does not start.
    """
    if apart and os.name == "nt":
        options["creationflags"] = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
    command = [sys.executable, "-c", ("" if apart else _FOLLOWING) + _CODE.format(path=sys.path), *words]
    options["stdin"] = subprocess.DEVNULL if apart else subprocess.PIPE
    try:
        return subprocess.Popen(command, start_new_session=apart and os.name != "nt", **options)
    except (OSError, ValueError) as error:  # ValueError: a NUL in an option
        reason = getattr(error, "strerror", None) or error
        raise WgradError(f"wgrad {words[0]} does not start ({reason}): free memory, or shorten the options") from error


def ask_to_end(pid: int) -> None:
    """Ask a run to save and end, as Ctrl-C does. Raises WgradError if it cannot be signaled."""
    try:
        os.kill(pid, getattr(signal, "CTRL_BREAK_EVENT", signal.SIGTERM))
    except OSError as error:
        raise WgradError(f"process {pid} cannot be stopped: {error.strerror}: end it in its terminal") from error


def why_ended(status: int, output: str) -> str:
    """Return the reason of a command's failure: its last message, or else how its process ended."""
    for line in reversed(output.splitlines()):
        if line.startswith("wgrad: "):
            return line.removeprefix(ERROR).removeprefix("wgrad: ")
    return ended_by(status)


def ended_by(status: int) -> str:
    """Describe how a process without a message ended."""
    how = f"by signal {-status}" if status < 0 else f"with status {status}"
    return f"the process ended {how} and gave no reason: see its output"


class Command:
    """A command whose output is kept, read by a thread of its own.

    lines: the last of its output. address: where it listens, once it has printed it.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.words, self.lines = list(words), deque[str](maxlen=_KEPT_LINES)
        self.address = ""
        self._process = start(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1", **(environment or {})},
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, output: IO[bytes]) -> None:
        for line in output:
            text = line.decode("utf-8", "replace").rstrip()
            self.lines.append(text)
            found = text.rpartition(" at ")[2].partition(" ")[0]
            if text.startswith("serving ") and found.startswith("http://"):
                self.address = found.removesuffix("/v1")

    @property
    def state(self) -> str:
        """The state: "running", "done" or "failed"."""
        status = self._process.poll()
        if status is None or (self._reader.is_alive() and status == 0):
            return "running"
        return "failed" if status else "done"

    @property
    def reason(self) -> str:
        """The reason of a failure, or ""."""
        status = self._process.poll()
        return why_ended(status, "\n".join(self.lines)) if status else ""

    def end(self) -> None:
        """End the command, by force if it does not react."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def tail_of(path: Path, most: int) -> str:
    """Return at most the last `most` bytes of a text file that a process writes; "" if there is no such file."""
    try:
        with open_input(path, "RUN") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - most))
            text = file.read(most).decode("utf-8", "replace")
    except (OSError, WgradError):
        return ""
    return text.partition("\n")[2] if size > most else text
