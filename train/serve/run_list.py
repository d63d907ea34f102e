"""The runs of a folder: listing them, their states, and starting, stopping and resuming them.

A run is controlled only through its folder: the lock tells whether it runs and in which process, the log has its
output. So a restarted server finds the runs that another started.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.device.files import make_folder, own_file, writing
from wgrad.train.files.input_files import expand_path
from wgrad.train.model.adapter_config import CONFIG_FILE as ADAPTER_CONFIG
from wgrad.train.options.finetune_config import CONFIG_FILE, FinetuneConfig
from wgrad.train.options.option_fields import command_words
from wgrad.train.output.checkpoints import Checkpoints
from wgrad.train.output.metrics import METRICS_FILE
from wgrad.train.output.out_folder import HOLDER_FILE, holder_of
from wgrad.train.output.previous_run import RESULTS_FILE, SWEEP_FILE
from wgrad.train.output.watched import WatchedRun, as_metrics
from wgrad.train.serve.children import ERROR, ask_to_end, ended_by, start, tail_of

LOG_FILE = "log.txt"
_SIGNS = (CONFIG_FILE, METRICS_FILE, LOG_FILE, HOLDER_FILE, SWEEP_FILE)
# Files and folders that show the state of a run.
_TOLD_BY = (LOG_FILE, METRICS_FILE, RESULTS_FILE, SWEEP_FILE, CONFIG_FILE, ADAPTER_CONFIG, "checkpoints", "config.json")
_LOG_BYTES, _METRICS_BYTES = 1 << 15, 1 << 13
_LONGEST_LINE = 200
_STEP = re.compile(r"^step (\d{1,15})/(\d{1,15})\b(?:.*\bleft (\S+))?", re.MULTILINE | re.ASCII)


class RunList:
    """Runs in the subfolders of `folder`, and those started elsewhere by this server. Thread-safe."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._elsewhere: list[Path] = []
        self._children: dict[Path, subprocess.Popen[bytes]] = {}
        self._watched: dict[Path, WatchedRun] = {}
        self._states: dict[Path, tuple[Any, dict[str, Any]]] = {}  # signature of the files, and the state
        self._lock = threading.RLock()

    def folders(self) -> list[Path]:
        """Return the folders of runs, the newest first."""
        try:
            inside = [
                path for path in self.folder.iterdir() if any(map(os.path.exists, (path / name for name in _SIGNS)))
            ]
        except OSError:
            inside = []
        found = [*inside, *(path for path in self._elsewhere if os.path.isdir(path))]
        return sorted(found, key=_begun, reverse=True)

    def free(self, runs: int) -> Path:
        """Return a folder for the next run, with a number beyond that of the runs there are."""
        number = runs + 1
        while os.path.lexists(self.folder / f"run-{number}"):
            number += 1
        return self.folder / f"run-{number}"

    def find(self, name: Any) -> Path:
        """Return the folder of a run. Raises WgradError if there is none of that name."""
        for path in self.folders():
            if str(path) == name:
                return path
        raise WgradError(f"run: there is none in {str(name)[:200]!r}: choose one of the list")

    def watched(self, path: Path) -> WatchedRun:
        """Return the reader of a run's files."""
        with self._lock:
            if path not in self._watched:
                self._watched[path] = WatchedRun(str(path))
            return self._watched[path]

    def state(self, path: Path) -> dict[str, Any]:
        """Return the state of a run: `state` (running, done, stopped or failed) and its `reason`; `step` of `steps`,
        the time `left` and the last `line` of its log; its last losses; and whether it can be resumed (`resumes`), and
        has an `adapter` or a whole `model`."""
        child = self._children.get(path)
        status = child.poll() if child is not None else None
        going = (child is not None and status is None) or holder_of(path) is not None
        signature = (going, status, *map(_changed, (path / name for name in _TOLD_BY)))
        known = self._states.get(path)
        if known is None or known[0] != signature:
            known = self._states[path] = (signature, self._state(path, going, status))
        return known[1]

    def _state(self, path: Path, going: bool, status: int | None) -> dict[str, Any]:
        log = tail_of(path / LOG_FILE, _LOG_BYTES).rpartition("\n$ wgrad ")[2]  # since the last start
        state, reason = ("running", "") if going else _ended(path, log, status)
        steps = _STEP.findall(log)
        step, total, left = steps[-1] if steps else (None, None, None)
        numbers = _last_numbers(path / METRICS_FILE)
        try:
            checkpoints = bool(Checkpoints(path).steps())
        except WgradError:  # its folder cannot be read
            checkpoints = False
        return {
            "run": str(path),
            "name": path.name,
            "state": state,
            "reason": reason,
            "step": numbers.get("step", int(step) if step else None),
            "steps": int(total) if total else None,
            "left": left or None,
            "line": log.rpartition("\n")[0].rpartition("\n")[2][:_LONGEST_LINE],
            "loss": numbers.get("loss"),
            "held_out_loss": numbers.get("held_out_loss"),
            "resumes": not going and checkpoints,
            "adapter": os.path.exists(path / ADAPTER_CONFIG),
            "model": os.path.exists(path / "config.json"),
            "log_bytes": _changed(path / LOG_FILE)[1],
        }

    def log(self, path: Path) -> str:
        """Return the end of a run's log."""
        return tail_of(path / LOG_FILE, _LOG_BYTES)

    def begin(self, values: Mapping[str, Any]) -> Path:
        """Start a run with these options of `finetune`, and return its folder.

        Raises:
            WgradError: it cannot be started there.
        """
        path = Path(expand_path(values["out"], "--out"))
        if os.path.realpath(path.parent) == os.path.realpath(self.folder):
            path = self.folder / path.name  # as in the list
        elif all(os.path.realpath(path) != os.path.realpath(other) for other in self._elsewhere):
            self._elsewhere.append(path)
        return self._start(path, command_words(FinetuneConfig, values))

    def resume(self, path: Path, values: Mapping[str, Any]) -> None:
        """Resume a run with these options changed. Raises WgradError if it is running."""
        self._start(path, command_words(FinetuneConfig, values))

    def _start(self, path: Path, words: Sequence[str]) -> Path:
        words = ["finetune", *words]
        with self._lock:
            if os.path.exists(path) and self.state(path)["state"] == "running":
                raise WgradError(f"--out: the run in {path} goes on already: stop it, or choose another folder")
            make_folder(path)
            with writing(path), open(path / LOG_FILE, "ab", opener=own_file) as log:
                log.write(f"$ wgrad {shlex.join(words)}\n".encode("utf-8", "backslashreplace"))
                log.flush()
                environment = {**os.environ, "PYTHONUTF8": "1"}
                self._children[path] = start(words, apart=True, stdout=log, stderr=log, env=environment)
        return path

    def stop(self, path: Path) -> None:
        """Ask a run to save and end; if asked again, it ends at once. Raises WgradError if it is not running."""
        child = self._children.get(path)
        pid = child.pid if child is not None and child.poll() is None else holder_of(path)
        if pid is None:
            raise WgradError(f"run: {path} does not go on: there is nothing to stop")
        ask_to_end(pid)


def _ended(path: Path, log: str, status: int | None) -> tuple[str, str]:
    """Return state and reason of a run that is not running."""
    lines = log.splitlines()
    word = next((line for line in reversed(lines) if line.startswith("wgrad: ")), "")
    if word and "done in" not in lines[-1]:
        return ("failed", word.removeprefix(ERROR)) if word.startswith(ERROR) else ("stopped", word[len("wgrad: ") :])
    if os.path.exists(path / RESULTS_FILE) or os.path.exists(path / SWEEP_FILE):
        return "done", ""
    if status and -status != signal.SIGTERM:  # asked to end before it could answer
        return "failed", ended_by(status)
    return "stopped", ""


def _last_numbers(path: Path) -> dict[str, Any]:
    """Return the last step, loss and held-out loss of a file of metrics."""
    found: dict[str, Any] = {}
    for line in tail_of(path, _METRICS_BYTES).splitlines():
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            found |= as_metrics(record) if isinstance(record, dict) else {}
    return found


def _begun(path: Path) -> float:
    """Return the time of the run's last start: that of its options, or else of its folder."""
    for name in (CONFIG_FILE, ""):
        try:
            return (path / name).stat().st_mtime
        except OSError:
            pass
    return 0.0


def _changed(path: Path) -> tuple[int, int]:
    """Return the time of the last change of a file or folder, and its size."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
