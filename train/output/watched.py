"""Folders of runs, read while another process writes them: only what is new, and without changing anything.

Anything may be there: no folder yet, half a line, a file that a resumed run has cut back, files of other programs. So
files are read in bounded pieces, and lines that are no records are counted and skipped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import YAML_LIMIT, parse_json, read_yaml
from wgrad.train.files.input_files import open_input, read_input, reading
from wgrad.train.options.finetune_config import CONFIG_FILE
from wgrad.train.output.metrics import METRICS_FILE, SAMPLES_FILE
from wgrad.train.output.previous_run import PROFILE_FILE, RESULTS_FILE

PIECE = 1 << 22  # bytes read at once; a longer line is no record
MOST_BYTES = 1 << 26  # most bytes of a file; a run of 300,000 steps has fewer
MOST_KEYS = 100  # most keys of a record, of the options, of the results
LONGEST_TEXT = 4000  # characters of a sample, an option or a result
LONGEST_KEY = 100  # characters
MOST_SENT = 5000  # most records in one answer
_MARK = 256  # bytes at the end of the read part by which a file is recognized
_LARGEST = 1e300  # largest number that the page can show
_RUN = "RUN"  # name of the argument for errors


def _number(value: Any) -> float | int | None:
    """Return a number that JSON and the page can hold; None: it is no number, or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < _LARGEST else None


def _step(value: Any) -> int:
    """Return the number of a step. ValueError: it is none."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 53:
        raise ValueError
    return value


def as_metrics(record: dict[str, Any]) -> dict[str, Any]:
    """Return the step and the numbers of a record of metrics.jsonl; None: not finite. ValueError: it has no step."""
    kept: dict[str, Any] = {"step": _step(record.get("step"))}
    for key, value in list(record.items())[:MOST_KEYS]:
        if key not in ("step", "format") and (value is None or isinstance(value, int | float)):
            kept[key[:LONGEST_KEY]] = _number(value)
    return kept


def as_sample(record: dict[str, Any]) -> dict[str, Any]:
    """Return step, prompt and text of a record of samples.jsonl, shortened to be shown. ValueError: one is missing."""
    prompt, text = record.get("prompt"), record.get("text")
    if not isinstance(prompt, str) or not (text is None or isinstance(text, str)):
        raise ValueError
    text = text if text is None else text[:LONGEST_TEXT]
    return {"step": _step(record.get("step")), "prompt": prompt[:LONGEST_TEXT], "text": text}


class Tail:
    """Records of a growing file with JSON lines.

    Attributes:
        records: Records read so far.
        generation: How often the file was replaced or cut, as by a resumed run, which makes earlier records obsolete.
        passed_over: Number of lines that are no records.
        note: Why reading has stopped; "": it has not.
        changed: Time of the last change, as of time.time(); None: not known.
    """

    def __init__(self, path: Path, convert: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.path, self._convert = path, convert
        self.generation = 0
        self._identity: tuple[int, int] | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.passed_over, self.note = 0, ""
        self._offset, self._last = 0, b""  # bytes read, and the last of them, by which the file is recognized
        self.changed: float | None = None

    def read(self) -> bool:
        """Read at most PIECE new bytes, and return whether there are more."""
        try:
            with open_input(self.path, _RUN) as file, reading(self.path, _RUN):
                found = os.fstat(file.fileno())
                file.seek(max(0, self._offset - len(self._last)))
                same = file.read(len(self._last)) == self._last  # false if the file is shorter now
                if (found.st_dev, found.st_ino) != self._identity or not same:
                    self.generation += 1
                    self._begin_anew()
                    self._identity = found.st_dev, found.st_ino
                    file.seek(0)
                self.changed = found.st_mtime
                if self.note:
                    return False
                if self._offset >= MOST_BYTES:
                    self.note = f"{self.path.name}: only its first {MOST_BYTES >> 20} MiB are shown"
                    return False
                piece = file.read(PIECE)
        except WgradError as error:
            return self._not_there(str(error))
        return self._take(piece)

    def _not_there(self, why: str) -> bool:
        if self._identity is not None:
            self.generation += 1
        self._identity = None
        self._begin_anew()
        self.note = "" if not os.path.lexists(self.path) else why
        return False

    def _take(self, piece: bytes) -> bool:
        """Keep the records of complete lines; an incomplete one is read again later."""
        whole = piece[: piece.rfind(b"\n") + 1]
        if not whole:
            if len(piece) == PIECE:
                self.note = f"{self.path.name}: a line of more than {PIECE >> 20} MiB is none of a run"
            return False
        for line in whole.split(b"\n"):
            if line.strip():
                self._keep(line)
        self._offset += len(whole)
        self._last = whole[-_MARK:]
        return len(piece) == PIECE

    def _keep(self, line: bytes) -> None:
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise ValueError
            self.records.append(self._convert(value))
        except (ValueError, RecursionError):
            self.passed_over += 1

    def news(self, generation: int, count: int) -> dict[str, Any]:
        """Return the records after the first `count` of a generation; `anew`: the reader must discard its own."""
        anew = generation != self.generation or count > len(self.records)
        start = 0 if anew else count
        end = start + MOST_SENT
        return {
            "generation": self.generation,
            "anew": anew,
            "records": self.records[start:end],
            "more": end < len(self.records),
            "passed_over": self.passed_over,
            "note": self.note,
        }


class Whole:
    """A small file that is read again whenever it changes. value: its contents; None: it is missing or damaged."""

    def __init__(self, path: Path, read: Callable[[Path], Any]) -> None:
        self.path, self._read = path, read
        self._state: tuple[int, int, int] | None = None
        self.value: Any = None
        self.note = ""

    def read(self) -> None:
        try:
            found = os.stat(self.path)
            state = (found.st_ino, found.st_size, found.st_mtime_ns)
        except (OSError, ValueError):
            self._state, self.value, self.note = None, None, ""
            return
        if state == self._state:
            return
        self._state, self.value, self.note = state, None, ""
        try:
            self.value = self._read(self.path)
        except WgradError as error:
            self.note = str(error)


def _table(value: Any) -> dict[str, str]:
    """Return an object's values as texts for a table."""
    if not isinstance(value, dict):
        return {}
    shown = {}
    for key, one in list(value.items())[:MOST_KEYS]:
        text = one if isinstance(one, str) else json.dumps(one, default=str, skipkeys=True)
        shown[str(key)[:LONGEST_KEY]] = text[:LONGEST_TEXT]
    return shown


def _read_options(path: Path) -> dict[str, str]:
    return _table(read_yaml(path, _RUN))


def _read_results(path: Path) -> dict[str, str]:
    return _table(parse_json(read_input(path, _RUN, 1 << 20), f"{_RUN}: {path}"))


def _read_profile(path: Path) -> str:
    return read_input(path, _RUN, YAML_LIMIT).decode("utf-8", "replace")


class WatchedRun:
    """A run's folder, which need not exist yet. WgradError: its path is that of a file."""

    def __init__(self, folder: str) -> None:
        path = Path(folder)
        if os.path.exists(path) and not os.path.isdir(path):
            raise WgradError(f"{_RUN}: {folder} must be the folder of a run (its --out); got a file: give its folder")
        self.name, self.folder = folder, path
        self.metrics = Tail(path / METRICS_FILE, as_metrics)
        self.samples = Tail(path / SAMPLES_FILE, as_sample)
        self._options = Whole(path / CONFIG_FILE, _read_options)
        self._results = Whole(path / RESULTS_FILE, _read_results)
        self._profile = Whole(path / PROFILE_FILE, _read_profile)

    def read(self) -> bool:
        """Read what is new, and return whether there is more."""
        for file in (self._options, self._results, self._profile):
            file.read()
        more = [self.metrics.read(), self.samples.read()]
        return any(more)

    def news(self, have: tuple[int, int, int, int]) -> dict[str, Any]:
        """Return what is new as JSON. have: generation and number of the reader's metrics, then of its samples."""
        wholes = {"options": self._options, "results": self._results, "profile": self._profile}
        notes = [self.metrics.note, self.samples.note, *(file.note for file in wholes.values())]
        changed = self.metrics.changed
        return {
            "name": self.name,
            "there": os.path.isdir(self.folder),
            "silent_seconds": None if changed is None else max(0, round(time.time() - changed)),
            "metrics": self.metrics.news(*have[:2]),
            "samples": self.samples.news(*have[2:]),
            **{name: file.value for name, file in wholes.items()},
            "notes": [note for note in notes if note],
        }
