"""Result of a fine-tune, as a Python caller gets it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from wgrad.train.files.decode import read_json
from wgrad.train.output.callbacks import StepReport, step_report
from wgrad.train.output.metrics import METRICS_FILE, read_steps
from wgrad.train.output.previous_run import RESULTS_FILE


@dataclass(frozen=True)
class FinetuneResult:
    """A run that is finished. Losses: mean nats a token of what is held out; None: nothing is, or not finite.

    out: the folder, which holds the adapter in PEFT's format (with full=True the model). steps: done; result_step: the
    one that the result is of (with keep_best the best). samples: what followed the first prompt. peak_bytes: of the
    device's memory. values: all that results.json has.
    """

    out: Path
    steps: int
    result_step: int
    skipped_steps: int
    held_out_loss_before: float | None
    held_out_loss_after: float | None
    sample_before: str | None
    sample_after: str | None
    seconds: float
    peak_bytes: int
    stopped_early: bool
    stopped_by_callback: bool
    values: dict[str, Any]

    def metrics(self) -> list[StepReport]:
        """Every step of the run, from metrics.jsonl."""
        return [step_report(record, self.steps) for record in read_steps(self.out / METRICS_FILE)]


class _Results(msgspec.Struct):
    """results.json, as far as it has fields of its own above."""

    steps: int
    result_step: int
    skipped_steps: int
    seconds: float
    peak_bytes: int
    held_out_loss_before: float | None = None
    held_out_loss_after: float | None = None
    sample_before: str | None = None
    sample_after: str | None = None
    stopped_early: int | None = None
    stopped_by_callback: bool = False


def read_results(out: str) -> FinetuneResult:
    """Read the result of the run in `out`. Raises WgradError: it is not finished, or its files are damaged."""
    path = Path(out, RESULTS_FILE)
    advice = "begin anew in another --out"
    found = msgspec.structs.asdict(read_json(path, _Results, "--out", advice))
    values = read_json(path, dict[str, Any], "--out", advice)
    return FinetuneResult(out=Path(out), values=values, **found | {"stopped_early": bool(found["stopped_early"])})
