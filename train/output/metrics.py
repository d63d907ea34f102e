"""Files of JSON objects, one a line, appended as the run goes, and cut back to the checkpoint when it resumes:
metrics.jsonl (an object a step, and one each time that the held-out loss is measured) and samples.jsonl."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import msgspec

from wgrad.device.errors import WgradError
from wgrad.device.files import write_bytes, writing
from wgrad.train.files.input_files import exists, open_input, reading
from wgrad.train.output.checkpoints import Loss, Step
from wgrad.train.output.out_folder import identity_of

METRICS_FILE, SAMPLES_FILE = "metrics.jsonl", "samples.jsonl"
_LONGEST_LINE = 1 << 16  # bytes; ours have some 200
_LONGEST_SAMPLE = 1 << 24  # it holds its prompt
_END = 1 << 26  # bytes of one line after which a file is not read on: a sparse file can have a million times as many
HELD_OUT_LOSS = "held_out_loss"
FORMAT = 1  # the first record of a file names it


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of metrics.jsonl. Lines that are none are left out."""
    return _read(path, _LONGEST_LINE, dict[str, Loss], 1)[0]


def read_steps(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of steps alone, without those of what is held out."""
    return [record for record in read_metrics(path) if HELD_OUT_LOSS not in record]


def _read(path: str | os.PathLike[str], longest: int, kind: Any, first: int) -> tuple[list[dict[str, Any]], int]:
    """-> the objects of such a file that are a `kind` with a step of at least `first` (of a held-out loss also 0), and
    how many other lines it has. A last line that a killed process left half-written does not count.
    """
    records: list[dict[str, Any]] = []
    invalid = 0
    if not exists(path, "--out"):
        return records, invalid
    with open_input(path, "--out") as file, reading(path, "--out"):
        while line := file.readline(longest):
            value = _record(line, kind, first)
            if value is None:
                rest, passed = line, len(line)
                while len(rest) == longest and not rest.endswith(b"\n") and passed < _END:  # a line that is too long
                    rest = file.readline(longest)
                    passed += len(rest)
                invalid += line is not rest or line.endswith(b"\n")
                if passed >= _END:
                    break
                continue
            if value.pop("format", FORMAT) != FORMAT:
                raise WgradError(
                    f"{os.fspath(path)} was written by another version of wgrad, in another format: remove it"
                )
            records.append(value)
    return records, invalid


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _record(line: bytes, kind: Any, first: int) -> dict[str, Any] | None:
    """A line's record; None where it is none."""
    try:
        value = json.loads(line, parse_constant=_no_constant)
        msgspec.convert(value, kind)
        step = msgspec.convert(value["step"], Step)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return value if step >= first or (step == 0 and HELD_OUT_LOSS in value) else None


def _plain(value: Any) -> Any:
    """Convert to a value that JSON can hold: NumPy scalars become Python's, NaN and infinity become null."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(record: dict[str, Any], *, first: bool) -> bytes:
    record = {"format": FORMAT, **record} if first else record
    return (json.dumps(record, allow_nan=False) + "\n").encode()


class RecordsFile:
    """Appends objects to a file. Of those that are there already, records up to step `last` stay. invalid: how many of
    its lines were no records.

    writes: whether this process does; the records of another are kept in memory until it is asked to `take_over`.
    What is not finite becomes null. Each line reaches the operating system at once, so that a killed process loses
    none; `sync` brings them to the disk.
    Raises WgradError where the disk is full.
    """

    longest = _LONGEST_LINE
    first = 1  # step
    kind: Any = dict[str, Loss]  # besides `step`

    def __init__(self, path: Path, last: int, *, writes: bool = True) -> None:
        self.path = path
        records, self.invalid = _read(path, self.longest, self.kind, self.first)
        self.records = [record for record in records if record["step"] <= last]
        self._file: IO[bytes] | None = None
        if writes:
            self.take_over()

    def keep(self) -> bool:
        """Write the file anew where somebody has removed or replaced it -> whether that was so."""
        if self._file is None:
            return False
        own = os.fstat(self._file.fileno())
        if identity_of(self.path) == (own.st_dev, own.st_ino):
            return False
        self._file.close()
        self.take_over()
        return True

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MetricsFile(RecordsFile):
    """OUT/metrics.jsonl. `steps_done`: steps that the run has behind it; later records are dropped first. None: the run
    begins.

    A record of a step holds step (1 for the first), loss, lr, grad_norm, tokens, tokens_per_second, memory_bytes
    (reserved on the device), and the objective's metrics (rewards/margins, ...); one of a measure step (0: before the
    first), held_out_loss, and those as held_out_rewards/margins, ...
    """

    def __init__(self, folder: str | os.PathLike[str], steps_done: int | None = None, *, writes: bool = True) -> None:
        super().__init__(Path(folder) / METRICS_FILE, -1 if steps_done is None else steps_done, writes=writes)

    def of_steps(self) -> list[dict[str, Any]]:
        """The records of steps alone."""
        return [record for record in self.records if HELD_OUT_LOSS not in record]

    def held_out(self) -> dict[int, float | None]:
        """The held-out loss after each step at which it was measured while the run went on."""
        return {record["step"]: record[HELD_OUT_LOSS] for record in self.records if HELD_OUT_LOSS in record}

    def write_held_out(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """A measure; one that is there already (the run was killed before its checkpoint) is the same, and stays."""
        if step not in self.held_out():
            named = {f"held_out_{name}": value for name, value in metrics.items()}
            self.write({"step": step, HELD_OUT_LOSS: loss, **named})


class _Sample(msgspec.Struct, forbid_unknown_fields=True):
    step: int
    prompt: str
    text: str | None
    format: int = FORMAT


class SamplesFile(RecordsFile):
    """OUT/samples.jsonl: step (0: before the first), prompt, and text, which continues it (null: no numbers to choose
    it by). steps_done: as in MetricsFile; None: the run begins."""

    longest, first, kind = _LONGEST_SAMPLE, 0, _Sample

    def __init__(self, folder: str | os.PathLike[str], steps_done: int | None, *, writes: bool = True) -> None:
        super().__init__(Path(folder) / SAMPLES_FILE, -1 if steps_done is None else steps_done, writes=writes)

    def of(self, step: int) -> dict[str, str | None]:
        """Prompt to text."""
        return {r["prompt"]: r["text"] for r in self.records if r["step"] == step}
