"""State of --out before a run: empty, a run to resume, a finished run, or one to extend."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import msgspec

from wgrad.device.errors import WgradError
from wgrad.device.shown import counted
from wgrad.train.files.decode import read_json
from wgrad.train.model.adapter_files import WEIGHTS_FILE
from wgrad.train.model.model_files import SINGLE_FILE
from wgrad.train.options.config_yaml import read_config_file
from wgrad.train.options.finetune_config import CONFIG_FILE, FinetuneConfig, RunOptions
from wgrad.train.options.options import flag
from wgrad.train.output.checkpoints import Checkpoints

RESULTS_FILE, SWEEP_FILE = "results.json", "sweep.json"
RESULTS_FORMAT = 1
PROFILE_FILE = "profile.txt"  # output of --profile
# Resuming a finished run ignores differences in these options, and in the group "machine", because nothing runs.
_NO_PART_OF_THE_RESULT = ("resume", "out", "max_steps", "epochs")
_PART_OF_THE_RESULT = ("sample_prompt",)  # exceptions in the group "machine"


class Length(msgspec.Struct):
    """Length of a finished run, from results.json."""

    format: int
    steps: Annotated[int, msgspec.Meta(ge=1)]
    max_steps: int | None
    epochs: int
    stopped_early: Annotated[int, msgspec.Meta(ge=1)] | None = None  # --early-stopping-patience, if it ended the run
    stopped_by_callback: bool = False


@dataclass(frozen=True)
class Previous:
    """State of a previous run."""

    finished: bool = False  # whether nothing is left to do
    stopped: bool = False  # whether --early-stopping-patience ended it
    ended_at: int | None = None  # steps of a finished run that is extended


def previous_run(config: FinetuneConfig) -> Previous:
    """Return the state of --out. WgradError: a run would be overwritten, or an option would be ignored."""
    out = Path(config.out)
    if not config.resume:
        _refuse_old(out)
        if config.lr_sweep and (out / SWEEP_FILE).exists():
            raise WgradError(f"--out: {out} already holds a sweep ({SWEEP_FILE}): choose another folder")
        return Previous()
    if not (out / RESULTS_FILE).exists():
        return Previous()
    length = read_json(out / RESULTS_FILE, Length, "--resume", "begin anew in another --out")
    if length.format != RESULTS_FORMAT:
        raise WgradError(
            f"--resume: {out / RESULTS_FILE} has format {length.format}, and this version of wgrad reads format "
            f"{RESULTS_FORMAT}: begin anew in another --out"
        )
    if not (length.stopped_by_callback or (_more_patient if length.stopped_early else _longer)(config, length)):
        _refuse_ignored(config, out)
        return Previous(finished=True, stopped=bool(length.stopped_early))
    if not Checkpoints(out).steps():
        raise WgradError(
            f"--resume: the finished run in {out} has no checkpoint to go on from: train its adapter further with "
            f"--adapter {out} and another --out"
        )
    return Previous(ended_at=length.steps)


def _refuse_old(out: Path) -> None:
    finished = [name for name in (RESULTS_FILE, WEIGHTS_FILE, SINGLE_FILE) if (out / name).exists()]
    if Checkpoints(out).steps() and RESULTS_FILE not in finished:
        raise WgradError(f"--out: {out} holds an unfinished run: go on with --resume, or choose another folder")
    if finished:
        raise WgradError(f"--out: {out} already holds a finished run ({finished[0]}): choose another folder")


def _longer(config: FinetuneConfig, length: Length) -> bool:
    """Return whether more steps are asked for than were done. WgradError: fewer are."""
    if config.max_steps is not None:
        if config.max_steps < length.steps:
            raise WgradError(
                f"--max-steps: the run in {config.out} already has {counted(length.steps, 'step')}, more than the "
                f"{config.max_steps} asked for: give more, or another --out"
            )
        if config.epochs != length.epochs and config.max_steps == length.max_steps:
            raise WgradError(
                f"--epochs: would be ignored, because --max-steps {config.max_steps} decides the length of the run in "
                f"{config.out}: give more --max-steps"
            )
        return config.max_steps > length.steps
    if config.epochs < length.epochs:
        raise WgradError(
            f"--epochs: the run in {config.out} already has {length.epochs}, more than the {config.epochs} asked for: "
            "give more, or another --out"
        )
    return config.epochs > length.epochs


def _more_patient(config: FinetuneConfig, length: Length) -> bool:
    """Return whether a run that was stopped early is to continue. WgradError: only its length is increased."""
    assert length.stopped_early is not None
    if not 0 < config.early_stopping_patience <= length.stopped_early:
        return True
    for name in ("max_steps", "epochs"):
        if getattr(config, name) != getattr(length, name):
            raise WgradError(
                f"{flag(name)}: would be ignored: --early-stopping-patience {length.stopped_early} ended the run in "
                f"{config.out} after step {length.steps}: give a larger --early-stopping-patience too, or 0"
            )
    return False


def _refuse_ignored(config: FinetuneConfig, out: Path) -> None:
    """Raise WgradError for an option that differs from the finished run's and would be ignored."""
    path = out / CONFIG_FILE
    if not path.exists():
        return
    before = RunOptions(**read_config_file(path))
    for field in fields(RunOptions):
        if field.name in _NO_PART_OF_THE_RESULT:
            continue
        if field.metadata["group"] == "machine" and field.name not in _PART_OF_THE_RESULT:
            continue
        if getattr(config, field.name) != getattr(before, field.name):
            raise WgradError(
                f"{flag(field.name)}: would be ignored, because the run in {out} is finished: extend it with more "
                "--max-steps or --epochs, or begin another in another --out"
            )
