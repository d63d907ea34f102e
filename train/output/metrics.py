"""Files with one JSON object per line, which grow during a run and are cut back to the checkpoint when it resumes.

metrics.jsonl has an object for each step and each evaluation; samples.jsonl has one for each sample.
"""

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
_LONGEST_LINE = 1 << 16  # bytes; ours have about 200
_LONGEST_SAMPLE = 1 << 24  # bytes; a sample contains its prompt
_END = 1 << 26  # bytes of one line after which reading stops: a sparse file can have a million times as many
HELD_OUT_LOSS = "held_out_loss"
FORMAT = 1  # named by the first record of a file


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the records of metrics.jsonl, without invalid lines."""
    return _read(path, _LONGEST_LINE, dict[str, Loss], 1)[0]


def read_steps(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the records of steps, without those of evaluations."""
    return [record for record in read_metrics(path) if HELD_OUT_LOSS not in record]


def _read(path: str | os.PathLike[str], longest: int, kind: Any, first: int) -> tuple[list[dict[str, Any]], int]:
    """Read the records of a file.

    Args:
        path: The file; it need not exist.
        longest: Most bytes of a line.
        kind: Type of a record.
        first: Least step of a record (evaluations may also have step 0).

    Returns:
        The records, and the number of invalid lines, except a last one that a killed process left half-written.
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
    """Parse a line; None: it is no record."""
    try:
        value = json.loads(line, parse_constant=_no_constant)
        msgspec.convert(value, kind)
        step = msgspec.convert(value["step"], Step)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return value if step >= first or (step == 0 and HELD_OUT_LOSS in value) else None


def _plain(value: Any) -> Any:
    """Convert a value for JSON: NumPy scalars become Python's, NaN and infinity become null."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(record: dict[str, Any], *, first: bool) -> bytes:
    record = {"format": FORMAT, **record} if first else record
    return (json.dumps(record, allow_nan=False) + "\n").encode()


class RecordsFile:
    """Appends records to a file. Each line reaches the operating system at once, so that a killed process loses none.

    Numbers that are not finite become null. Raises WgradError if the disk is full.

    Args:
        path: The file.
        last: Step up to which existing records are kept.
        writes: Whether this process writes the file. If not, it keeps records in memory until `take_over`.

    Attributes:
        records: All records.
        invalid: Number of invalid lines that the file had.
    """

    longest = _LONGEST_LINE
    first = 1  # least step
    kind: Any = dict[str, Loss]

    def __init__(self, path: Path, last: int, *, writes: bool = True) -> None:
        self.path = path
        records, self.invalid = _read(path, self.longest, self.kind, self.first)
        self.records = [record for record in records if record["step"] <= last]
        self._file: IO[bytes] | None = None
        if writes:
            self.take_over()

    def keep(self) -> bool:
        """Write the file again if somebody has removed or replaced it, and return whether that was so."""
        if self._file is None:
            return False
        own = os.fstat(self._file.fileno())
        if identity_of(self.path) == (own.st_dev, own.st_ino):
            return False
        self._file.close()
        self.take_over()
        return True

    def take_over(self) -> None:
        """Make this process the one that writes the file, beginning with all records so far."""
        write_bytes(self.path, b"".join(_line(r, first=not i) for i, r in enumerate(self.records)))
        with writing(self.path):
            self._file = open(self.path, "ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record."""
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
            with self._file:
                self.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MetricsFile(RecordsFile):
    """OUT/metrics.jsonl.

    The record of a step holds step (from 1), loss, lr, grad_norm, tokens, tokens_per_second, memory_bytes (reserved on
    the device), and the objective's metrics (rewards/margins, ...). The record of an evaluation holds step (0: before
    the first), held_out_loss, and metrics as held_out_rewards/margins, ...

    steps_done: steps of the resumed run, whose later records are dropped; None: the run begins.
    """

    def __init__(self, folder: str | os.PathLike[str], steps_done: int | None = None, *, writes: bool = True) -> None:
        super().__init__(Path(folder) / METRICS_FILE, -1 if steps_done is None else steps_done, writes=writes)

    def of_steps(self) -> list[dict[str, Any]]:
        """Return the records of steps, without those of evaluations."""
        return [record for record in self.records if HELD_OUT_LOSS not in record]

    def held_out(self) -> dict[int, float | None]:
        """Return the held-out loss of each evaluation during the run, by step."""
        return {record["step"]: record[HELD_OUT_LOSS] for record in self.records if HELD_OUT_LOSS in record}

    def write_held_out(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """Record an evaluation, unless there is one of this step from before the run was killed, which is equal."""
        if step not in self.held_out():
            named = {f"held_out_{name}": value for name, value in metrics.items()}
            self.write({"step": step, HELD_OUT_LOSS: loss, **named})


class _Sample(msgspec.Struct, forbid_unknown_fields=True):
    step: int
    prompt: str
    text: str | None
    format: int = FORMAT


class SamplesFile(RecordsFile):
    """OUT/samples.jsonl, with step (0: before the first), prompt, and its continuation text (null: logits were not
    finite). steps_done: as for MetricsFile."""

    longest, first, kind = _LONGEST_SAMPLE, 0, _Sample

    def __init__(self, folder: str | os.PathLike[str], steps_done: int | None, *, writes: bool = True) -> None:
        super().__init__(Path(folder) / SAMPLES_FILE, -1 if steps_done is None else steps_done, writes=writes)

    def of(self, step: int) -> dict[str, str | None]:
        """Return the texts of a step, by prompt."""
        return {r["prompt"]: r["text"] for r in self.records if r["step"] == step}
