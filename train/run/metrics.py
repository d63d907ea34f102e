"""metrics.jsonl: one JSON object a step, appended as the run goes, and cut back to the checkpoint when it resumes."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from wgrad.device.errors import WgradError
from wgrad.device.files import write_bytes, writing
from wgrad.train.files.input_files import exists, open_input, reading

METRICS_FILE = "metrics.jsonl"
_LONGEST_LINE = 1 << 16  # bytes; ours have some 200
FORMAT = 1  # the first record of a file names it


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The objects of a metrics file; a last line that a killed process left half-written is left out."""
    records: list[dict[str, Any]] = []
    if not exists(path, "--out"):
        return records
    with open_input(path, "--out") as file, reading(path, "--out"):
        while line := file.readline(_LONGEST_LINE):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                break  # whatever follows a broken line was not written by us
            if not isinstance(value, dict):
                break
            if value.pop("format", FORMAT) != FORMAT:
                raise WgradError(
                    f"{os.fspath(path)} was written by another version of wgrad, in another format: remove it"
                )
            records.append(value)
    return records


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def _plain(value: Any) -> Any:
    """What JSON can hold: NumPy scalars become Python's, NaN and infinity become null."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(record: dict[str, Any], *, first: bool) -> bytes:
    record = {"format": FORMAT, **record} if first else record
    return (json.dumps(record, allow_nan=False) + "\n").encode()


class MetricsFile:
    """Appends to OUT/metrics.jsonl. `steps_done`: steps that the run has behind it; later records are dropped first.

    writes: whether this process does; the records of another are kept in memory until it is asked to `take_over`.
    A record holds step (1 for the first), loss, lr, grad_norm, tokens, tokens_per_second; what is not finite becomes
    null. Each line reaches the operating system at once, so that a killed process loses none; `sync` brings them to
    the disk.
    Raises WgradError where the disk is full.
    """

    def __init__(self, folder: str | os.PathLike[str], steps_done: int = 0, *, writes: bool = True) -> None:
        self.path = Path(folder) / METRICS_FILE
        self.records = [r for r in read_metrics(self.path) if _is_step(r.get("step")) and r["step"] <= steps_done]
        self._file: IO[bytes] | None = None
        if writes:
            self.take_over()

    def take_over(self) -> None:
        """From here on this process writes the file: first what it has had so far."""
        write_bytes(self.path, b"".join(_line(r, first=not i) for i, r in enumerate(self.records)))
        with writing(self.path):
            self._file = open(self.path, "ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        """Append one object."""
        record = {key: _plain(value) for key, value in record.items()}
        line = _line(record, first=not self.records)
        self.records.append(record)
        if self._file is None:
            return
        with writing(self.path):
            while line:  # an unbuffered write may take only a part
                line = line[self._file.write(line) :]

    def sync(self) -> None:
        """Return once all records are on the disk."""
        if self._file is not None:
            with writing(self.path):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None and not self._file.closed:
            self.sync()
            self._file.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
