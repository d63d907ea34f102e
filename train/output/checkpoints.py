"""Training state in OUT/checkpoints/step-N: everything that a run needs to resume bit by bit.

    trainer.safetensors   parameters, exp_avg, exp_avg_sq, optimizer state, loss scale (float32)
    adapter_*             the adapter in PEFT's format, for other uses (not read on resume)
    trainer.json          format, step, options and data of the run, results so far; SHA-256 of every other file, and
                          of itself

The random state is (seed, step), on which dropout and the order of the data depend. A checkpoint is written under
another name, fsynced and renamed, so a folder named step-N is complete; the sums reveal later damage.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from wgrad.device.errors import WgradError
from wgrad.device.files import atomic_folder, make_folder, remove_folder, remove_leftovers, write_json
from wgrad.train.files.decode import convert, parse_json, show
from wgrad.train.files.input_files import exists, one_line, open_input, read_input, reading
from wgrad.train.files.safetensors_files import from_arrays, read_entries, write_safetensors
from wgrad.train.options.former_names import with_current_names

FOLDER, STATE_FILE, INFO_FILE = "checkpoints", "trainer.safetensors", "trainer.json"
KEEP = 2  # newest checkpoints that are kept
FORMAT = 2  # format 1 had a sum of trainer.safetensors alone
_INFO_LIMIT = 16 << 20  # bytes of trainer.json
_LARGEST = 1e300  # largest loss, so that axes and sums stay finite
Loss = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)] | None
Step = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Schedule(msgspec.Struct):
    """Options that determine the learning rate of a step."""

    steps: Step
    lr: float = 0.0
    schedule: str = ""
    warmup: float = 0.0


class _Results(msgspec.Struct):
    """The part of the results so far that a resumed run reads."""

    seconds: Seconds = 0.0
    held_out_loss_before: Loss = None
    sample_before: str | None = None


class CheckpointInfo(msgspec.Struct):
    """Contents of trainer.json. Keys with a default may be missing."""

    step: Step
    files: dict[Annotated[str, msgspec.Meta(pattern=r"^[\w-][\w.-]*\Z")], str]  # SHA-256 of the folder's other files
    run: dict[str, Any] = {}  # must match to resume (`session.run_info`), as must `data`
    data: str = ""
    results: dict[str, float | int | str | bool | None] = {}
    schedule: Schedule | None = None
    shares: dict[Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,9}\Z")], Seconds] = {}  # of a micro-batch, by rank
    held_out: list[tuple[Step, Loss]] = []  # losses by step
    mode: dict[str, bool | int | str | None] = {}  # memory options that wgrad has chosen


@dataclass(frozen=True)
class TrainingState:
    """A checkpoint that was read: arrays of `AdamW.state_arrays`, and the contents of trainer.json."""

    path: Path
    step: int
    arrays: dict[str, np.ndarray]
    info: CheckpointInfo


class _Damaged(Exception):
    """A checkpoint is damaged; the message says how, in a few words."""


class Checkpoints:
    """The checkpoints of a run.

    Attributes:
        damaged: Reason for each checkpoint that `load` skipped. They are kept until a newer one is complete.
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.folder = Path(out) / FOLDER
        self.damaged: dict[Path, str] = {}

    def steps(self) -> list[Path]:
        """Return the folders of checkpoints, newest first, intact or not. WgradError: they cannot be listed."""
        if not exists(self.folder, "--resume") or not os.path.isdir(self.folder):
            return []
        with reading(self.folder, "--resume"):
            names = [name for name in os.listdir(self.folder) if re.fullmatch(r"step-[0-9]+", name)]
        found = [self.folder / name for name in names]
        return sorted(found, key=_number, reverse=True)

    def saved(self) -> Path | None:
        """Return the newest checkpoint that looks complete, without computing the slow sums of its files."""
        for path in self.steps():
            try:
                step = _read_info(path).step
            except (_Damaged, WgradError):
                continue
            if path.name == f"step-{step}" and os.path.isfile(path / STATE_FILE):
                return path
        return None

    def last_step(self) -> int:
        """Return the step of `saved`; 0: there is none."""
        path = self.saved()
        return 0 if path is None else _number(path)

    def load(self) -> TrainingState | None:
        """Read the newest intact checkpoint; None: there are no checkpoints.

        Raises:
            WgradError: All checkpoints are damaged, or one has another format.
        """
        if os.path.isdir(self.folder):
            remove_leftovers(self.folder)
        for path in self.steps():
            try:
                return _read(path)
            except _Damaged as damage:
                self.damaged[path] = str(damage)
        if self.damaged:
            listed = "; ".join(f"{path.name}: {reason}" for path, reason in self.damaged.items())
            raise WgradError(
                f"--resume: no checkpoint in {self.folder} is whole ({listed}): put a copy back, or begin anew in "
                "another --out; nothing was changed"
            )
        return None

    def save(
        self,
        step: int,
        arrays: Mapping[str, np.ndarray],
        info: Mapping[str, Any],
        extra: Callable[[Path], None] | None = None,
        best: Collection[int] = (),
    ) -> Path:
        """Write a checkpoint, then remove damaged and old ones.

        An intact checkpoint of the same step is left unchanged.

        Args:
            step: Steps done.
            arrays: Arrays of `AdamW.state_arrays`.
            info: Contents of trainer.json.
            extra: Adds further files to the folder.
            best: Steps whose checkpoints are kept in addition to the newest ones.

        Returns:
            The folder.

        Raises:
            WgradError: It cannot be written; existing checkpoints are kept.
        """
        target = make_folder(self.folder) / f"step-{step}"
        if not _is_whole(target):
            remove_folder(target)
            with atomic_folder(target) as beside:
                write_safetensors(beside / STATE_FILE, from_arrays(arrays))
                if extra:
                    extra(beside)
                files = {path.name: _sha256(path) for path in sorted(beside.iterdir())}
                write_json(beside / INFO_FILE, _signed({"format": FORMAT, "step": step, **info, "files": files}))
        self.damaged.pop(target, None)
        for path in self.damaged:
            remove_folder(path)
        self.damaged.clear()
        self.prune(best)
        return target

    def prune(self, best: Collection[int] = ()) -> None:
        """Remove all checkpoints but the newest ones and those of the steps `best`."""
        for path in self.steps()[KEEP:]:
            if _number(path) not in best:
                remove_folder(path)

    def arrays_of(self, step: int) -> dict[str, np.ndarray] | None:
        """Read the arrays of a step's checkpoint; None: it is gone or damaged."""
        try:
            return _read(self.folder / f"step-{step}").arrays
        except _Damaged:
            return None


def check_info(state: TrainingState, info: Mapping[str, Any]) -> None:
    """Raise WgradError, naming the difference, if a checkpoint belongs to other options or another model."""
    new = info["run"]
    old = with_current_names(state.info.run, new)
    for key in sorted(set(old) | set(new)):
        if old.get(key) == new.get(key):
            continue
        if key.startswith("the "):  # a digest of files
            raise WgradError(
                f"--resume: {one_line(key)} is not what it was when {state.path} was written: its files have changed, "
                "or others are given: give those, or another --out"
            )
        raise WgradError(
            f"--resume: {one_line(key)} was {show(old.get(key))} when {state.path} was written and is now "
            f"{show(new.get(key))}: give the same options, or another --out"
        )


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _signed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with its own sum, `digest`: SHA-256 of its JSON without spaces, with sorted keys."""
    plain = {key: value for key, value in json.loads(json.dumps(record)).items() if key != "digest"}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return {**plain, "digest": hashlib.sha256(text.encode()).hexdigest()}


def _is_whole(path: Path) -> bool:
    try:
        return os.path.exists(path) and bool(_read(path))
    except _Damaged:
        return False


def _read(path: Path) -> TrainingState:
    """Read a checkpoint. _Damaged: it is not intact. WgradError: another version of wgrad wrote it."""
    info = _read_info(path)
    if f"step-{info.step}" != path.name:
        raise _Damaged(f"it holds step {info.step}")
    if STATE_FILE not in info.files:
        raise _Damaged(f"{INFO_FILE} has no sum of {STATE_FILE}")
    for name, digest in info.files.items():
        try:
            if _sha256(path / name) != digest:
                raise _Damaged(f"{name} is not what was written")
        except WgradError as error:
            raise _Damaged(f"{name} cannot be read") from error
    try:
        entries = read_entries(path / STATE_FILE, "--resume")
        arrays = {name: np.array(entry.array()) for name, entry in entries.items()}
    except WgradError as error:
        raise _Damaged(f"{STATE_FILE} cannot be read") from error
    return TrainingState(path, info.step, arrays, info)


def _read_info(path: Path) -> CheckpointInfo:
    try:
        info = parse_json(read_input(path / INFO_FILE, "--resume", _INFO_LIMIT), INFO_FILE)
    except WgradError as error:
        raise _Damaged(f"{INFO_FILE} cannot be read") from error
    if not isinstance(info, dict):
        raise _Damaged(f"{INFO_FILE} is not what was written")
    if info.get("format") != FORMAT and _is_genuine(path, info):
        raise WgradError(
            f"--resume: {path} has format {show(info.get('format'))}, and this version of wgrad reads format {FORMAT}: "
            "go on with the version that wrote it, or begin anew in another --out"
        )
    if _signed(info) != info or info.get("format") != FORMAT:
        raise _Damaged(f"{INFO_FILE} is not what was written")
    try:
        typed = convert(info, CheckpointInfo, INFO_FILE, "")
        convert(info.get("results", {}), _Results, f"{INFO_FILE}: results", "")
        return typed
    except WgradError as error:
        raise _Damaged(str(error).rstrip(": ")) from error


def _is_genuine(path: Path, info: dict[str, Any]) -> bool:
    """Return whether the sum is right, so that another version of wgrad wrote this, not a damaged disk."""
    if "digest" in info:
        return _signed(info) == info
    try:
        return info.get("format") == 1 and info.get("sha256") == _sha256(path / STATE_FILE)
    except WgradError:
        return False


def _sha256(path: Path) -> str:
    with open_input(path, "--resume") as file, reading(path, "--resume"):
        return hashlib.file_digest(file, "sha256").hexdigest()
