"""Folders of runs, read while they are written, by somebody else, on any system: only what is new, and nothing changed.

What is there may be anything: no folder yet, half a line, a file that a resumed run has cut back, files of other
programs. It is read in bounded pieces, and what is no record is counted and passed over.
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

PIECE = 1 << 22  # bytes read at once, of which a line is a part: one without an end is no line of ours
MOST_BYTES = 1 << 26  # of a file; a run of 300,000 steps has fewer
MOST_KEYS = 100  # of a record, of the options, of the results
LONGEST_TEXT = 4000  # characters of a sample, an option or a result
LONGEST_KEY = 100
MOST_SENT = 5000  # records in one answer
_MARK = 256  # bytes
_LARGEST = 1e300
_RUN = "RUN"  # the argument, as errors name it


def _number(value: Any) -> float | int | None:
    """A number that JSON and the page can hold; None for one that is not finite, and for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < _LARGEST else None


def _step(value: Any) -> int:
    """ValueError: no number of a step."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 53:
        raise ValueError
    return value


def as_metrics(record: dict[str, Any]) -> dict[str, Any]:
    """Parse a line of metrics.jsonl into the step and its numbers; null where one is not finite. ValueError: no
    step."""
    kept: dict[str, Any] = {"step": _step(record.get("step"))}
    for key, value in list(record.items())[:MOST_KEYS]:
        if key not in ("step", "format") and (value is None or isinstance(value, int | float)):
            kept[key[:LONGEST_KEY]] = _number(value)
    return kept


def as_sample(record: dict[str, Any]) -> dict[str, Any]:
    """Step, prompt and text of a line of samples.jsonl, in a length that can be shown. ValueError: it lacks them."""
    prompt, text = record.get("prompt"), record.get("text")
    if not isinstance(prompt, str) or not (text is None or isinstance(text, str)):
        raise ValueError
    text = text if text is None else text[:LONGEST_TEXT]
    return {"step": _step(record.get("step")), "prompt": prompt[:LONGEST_TEXT], "text": text}


class Tail:
    """The records of a file of JSON lines that grows.

    records: those that were read; generation: how often the file was begun anew, as by a run that is resumed, whose
    records up to there are other ones; passed_over: lines that are no records; note: why nothing more is read.
    """

    def __init__(self, path: Path, convert: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.path, self._convert = path, convert
        self.generation = 0
        self._identity: tuple[int, int] | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.passed_over, self.note = 0, ""
        self._offset, self._last = 0, b""  # what is read, and its end, by which it is known again
        self.changed: float | None = None  # time.time() of the last change

    def read(self) -> bool:
        """Take what is new, PIECE bytes at most -> whether there is more."""
        try:
            with open_input(self.path, _RUN) as file, reading(self.path, _RUN):
                found = os.fstat(file.fileno())
                file.seek(max(0, self._offset - len(self._last)))
                same = file.read(len(self._last)) == self._last  # not where the file is shorter now
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
        """Keep the records of whole lines; the begin of one that is still written waits for its end."""
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
        """Return the records after the first `count` of a generation. anew: discard the earlier ones."""
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
    """A small file that is replaced as a whole, read anew when it changes. value: None while it is not there."""

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
    """An object's values as texts, for a table."""
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
    """A run's folder, which need not be there yet. WgradError: its name is that of a file."""

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
        """Take what is new -> whether there is more at once."""
        for file in (self._options, self._results, self._profile):
            file.read()
        more = [self.metrics.read(), self.samples.read()]
        return any(more)

    def news(self, have: tuple[int, int, int, int]) -> dict[str, Any]:
        """As JSON. have: generation and number of metrics, then of samples."""
        wholes = {"options": self._options, "results": self._results, "profile": self._profile}
        notes = [self.metrics.note, self.samples.note, *(file.note for file in wholes.values())]
        changed = self.metrics.changed
        return {
            "name": self.name,
            "there": self.folder.is_dir(),
            "silent_seconds": None if changed is None else max(0, round(time.time() - changed)),
            "metrics": self.metrics.news(*have[:2]),
            "samples": self.samples.news(*have[2:]),
            **{name: file.value for name, file in wholes.items()},
            "notes": [note for note in notes if note],
        }
