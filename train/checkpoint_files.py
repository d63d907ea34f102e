"""Training state in OUT/checkpoints/step-N: all that a run needs to go on to the same bits.

    trainer.safetensors   parameters, exp_avg, exp_avg_sq, optimiser state, loss scale (float32)
    trainer.json          step, data position and fingerprint, run fingerprint, SHA-256 of trainer.safetensors
    adapter_*             the adapter in PEFT's format, for people (not read on resume)

The random state is (seed, step): dropout counts, and the data order is a function of both. A checkpoint is written
beside, fsynced and renamed, so a folder named step-N is whole; its sum is checked all the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wgrad.autograd.errors import WgradError
from wgrad.train.files import atomic_folder, make_folder, remove_leftovers, write_json
from wgrad.train.safetensors_files import from_arrays, read_entries, write_safetensors

FOLDER, STATE_FILE, INFO_FILE = "checkpoints", "trainer.safetensors", "trainer.json"
KEEP = 2
_FORMAT = 1


@dataclass(frozen=True)
class TrainingState:
    """A checkpoint as read back: arrays of `AdamW.state_arrays`, and what trainer.json says."""

    path: Path
    step: int
    arrays: dict[str, np.ndarray]
    info: dict[str, Any]


def save_state(
    out: str | os.PathLike[str],
    step: int,
    arrays: Mapping[str, np.ndarray],
    info: Mapping[str, Any],
    extra: Callable[[Path], None] | None = None,
) -> Path:
    """Write OUT/checkpoints/step-`step` and drop all but the newest two. `extra` adds files to the folder.

    WgradError where the disk is full: the checkpoints there are stay as they were.
    """
    folder = make_folder(Path(out) / FOLDER)
    target = folder / f"step-{step}"
    if target.exists():  # of an earlier attempt, which read as damaged or was resumed before it
        shutil.rmtree(target)
    with atomic_folder(target) as beside:
        write_safetensors(beside / STATE_FILE, from_arrays(arrays))
        record = {"format": _FORMAT, "step": step, **info, "sha256": _sha256(beside / STATE_FILE)}
        write_json(beside / INFO_FILE, record)
        if extra:
            extra(beside)
    for old in _steps(folder)[KEEP:]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def load_state(out: str | os.PathLike[str]) -> TrainingState | None:
    """The newest checkpoint under `out` that is whole, or None. Damaged ones are passed over."""
    folder = Path(out) / FOLDER
    if not folder.is_dir():
        return None
    remove_leftovers(folder)
    for path in _steps(folder):
        state = _read(path)
        if state is not None:
            return state
    return None


def has_checkpoints(out: str | os.PathLike[str]) -> bool:
    """Whether `out` holds any checkpoint, whole or not."""
    return bool(_steps(Path(out) / FOLDER))


def drop_later(out: str | os.PathLike[str], step: int) -> None:
    """Remove checkpoints beyond `step`: damaged ones that a resumed run is about to write again."""
    for path in _steps(Path(out) / FOLDER):
        if _number(path) > step:
            shutil.rmtree(path, ignore_errors=True)


def check_info(state: TrainingState, info: Mapping[str, Any]) -> None:
    """WgradError, naming what differs, where the checkpoint is of a run with other options or another model."""
    old, new = state.info.get("run", {}), info["run"]
    for key in sorted(set(old) | set(new)):
        if old.get(key) != new.get(key):
            raise WgradError(
                f"--resume: {key} was {old.get(key)!r} when {state.path} was written and is now {new.get(key)!r}: "
                "give the same options, or another --out"
            )


def _steps(folder: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    found = [p for p in folder.glob("step-*") if re.fullmatch(r"step-\d+", p.name)] if folder.is_dir() else []
    return sorted(found, key=_number, reverse=True)


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _read(path: Path) -> TrainingState | None:
    try:
        info = json.loads((path / INFO_FILE).read_text(encoding="utf-8"))
        if info["format"] != _FORMAT or info["sha256"] != _sha256(path / STATE_FILE):
            return None
        entries = read_entries(path / STATE_FILE, "--resume")
        arrays = {name: np.array(entry.array()) for name, entry in entries.items()}
        return TrainingState(path, int(info["step"]), arrays, info)
    except (OSError, ValueError, KeyError, TypeError, WgradError):
        return None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
