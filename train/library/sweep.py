"""`wgrad.sweep`: a run for each combination of options from Python, with the options of the command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.library.finetune import Arguments, split_caller
from wgrad.train.library.results import FinetuneResult, read_results
from wgrad.train.library.signature import checked_names, takes
from wgrad.train.options.sweep_options import MOST, vary_of
from wgrad.train.run.trials import best_of, run_sweep

_VARY = (
    "what differs: name of an option -> list of values, or text as of --vary, such as '1e-5..1e-3' for values that "
    "are drawn"
)


@dataclass(frozen=True)
class Trial:
    """One run of a sweep. folder: of its adapter and results. options: those that differ, by name. held_out_loss: mean
    nats a token after the run; None: it failed, or nothing usable was measured. error: why it failed, or None."""

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
    """A sweep that is done. best: the trial with the lowest held-out loss."""

    trials: Sequence[Trial]
    best: Trial


@dataclass(frozen=True, kw_only=True)
class SweepArguments(Arguments):
    """The arguments of `sweep`. It is never made: type checkers go by it."""

    vary: Mapping[str, Sequence[Any] | str] = field(default_factory=dict, metadata={"help": _VARY})
    trials: int | None = field(default=None, metadata={"help": "draw this many combinations; None: try all"})


@takes(SweepArguments)
def sweep(**given: Any) -> SweepResult:
    """Run `finetune` for each combination of options, and compare the held-out losses.

    Each run is a folder in `out`. The same call goes on where an interrupted one ended: runs that are finished are not
    repeated. A trial that fails ends no other.

    Args:
        OPTIONS

    Returns:
        The trials, and the best of them.

    Raises:
        WgradError: An option is wrong, or `out` holds a sweep of other options.
        UnusableResult: No trial has a held-out loss.
        DeviceLost: The device is gone; the same call goes on.
    """
    options = checked_names(given, [f.name for f in fields(SweepArguments)], "sweep")
    vary, count = options.pop("vary", {}), options.pop("trials", None)
    if not isinstance(vary, Mapping) or not vary:
        raise WgradError(f"--vary: must be a mapping such as {{'lora_r': [8, 16]}}; got {vary!r}"[:300])
    if count is not None and not (isinstance(count, int) and 1 <= count <= MOST):
        raise WgradError(f"--trials: must be a whole number between 1 and {MOST}; got {count!r}")
    caller = split_caller(options)
    rows = run_sweep(options, [vary_of(name, values) for name, values in vary.items()], count, caller)
    names = [f.name for f in fields(Trial) if f.name != "folder"]
    trials = [Trial(Path(options["out"], row["folder"]), **{name: row[name] for name in names}) for row in rows]
    best = best_of(rows)
    assert best is not None  # else run_sweep has raised
    return SweepResult(trials, trials[rows.index(dict(best))])
