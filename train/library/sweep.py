"""`wgrad.sweep`: run all combinations of options from Python, like the command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.device.shown import short
from wgrad.train.library.finetune import Arguments, split_caller
from wgrad.train.library.results import FinetuneResult, read_results
from wgrad.train.library.signature import checked_names, takes
from wgrad.train.options.sweep_options import MOST, vary_of
from wgrad.train.run.trials import best_of, run_sweep

_VARY = (
    "options that differ, by name: each a list of values, or text, such as '1e-5..1e-3' for a range to draw values from"
)


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
        folder: Folder of its adapter and results.
        options: The options that differ, by name.
        held_out_loss: Mean nats per token after the run; None: it failed, or the loss was not finite.
        steps: Steps done; None: it failed.
        seconds: Time of the run; None: it failed.
        error: Why it failed; None: it did not.
    """

    folder: Path
    options: Mapping[str, Any]
    held_out_loss: float | None
    steps: int | None
    seconds: float | None
    error: str | None

    def result(self) -> FinetuneResult:
        """Return the result of the run. WgradError: it failed."""
        if self.error is not None:
            raise WgradError(f"{self.folder}: this trial failed: {self.error}")
        return read_results(str(self.folder))


@dataclass(frozen=True)
class SweepResult:
    """Result of a finished sweep. best: the trial with the lowest held-out loss."""

    trials: Sequence[Trial]
    best: Trial


@dataclass(frozen=True, kw_only=True)
class SweepArguments(Arguments):
    """Arguments of `sweep`, for type checkers and help(). It is never instantiated."""

    vary: Mapping[str, Sequence[Any] | str] = field(metadata={"help": _VARY})
    trials: int | None = field(default=None, metadata={"help": "draw this many combinations; None: try all"})


@takes(SweepArguments)
def sweep(**given: Any) -> SweepResult:
    """Run `finetune` for each combination of options, and compare the held-out losses.

    Each run is a folder in `out`. The same call resumes an interrupted sweep, without repeating finished runs. A trial
    that fails does not end the others.

    Args:
        OPTIONS

    Returns:
        All trials, and the best one.

    Raises:
        WgradError: An option is wrong, or `out` holds a sweep of other options.
        UnusableResult: No trial has a held-out loss.
        DeviceLost: The device was lost; the same call resumes.
    """
    options = checked_names(given, [f.name for f in fields(SweepArguments)], "sweep")
    vary, count = options.pop("vary", {}), options.pop("trials", None)
    if not isinstance(vary, Mapping) or not vary:
        raise WgradError(f"--vary: must be a mapping such as {{'lora_r': [8, 16]}}; got {short(vary)}")
    if count is not None and not (isinstance(count, int) and 1 <= count <= MOST):
        raise WgradError(f"--trials: must be a whole number between 1 and {MOST}; got {short(count)}")
    caller = split_caller(options)
    rows = run_sweep(options, [vary_of(name, values) for name, values in vary.items()], count, caller)
    names = [f.name for f in fields(Trial) if f.name != "folder"]
    trials = [Trial(Path(options["out"], row["folder"]), **{name: row[name] for name in names}) for row in rows]
    best = best_of(rows)
    assert best is not None  # else run_sweep has raised
    return SweepResult(trials, trials[rows.index(dict(best))])
