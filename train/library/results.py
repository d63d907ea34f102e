"""Result of a fine-tune for Python callers."""

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
    """Result of a finished run.

    Attributes:
        out: Output folder, with the adapter in PEFT's format (with full=True, the model).
        steps: Steps done.
        result_step: Step of the result: the last, or with keep_best the best.
        skipped_steps: Steps skipped because a gradient was not finite.
        held_out_loss_before, held_out_loss_after: Mean nats per token; None: nothing is held out, or not finite.
        sample_before, sample_after: Continuation of the first prompt; None: there is none.
        seconds: Time of the run.
        peak_bytes: Peak memory of the device.
        stopped_early: Whether early_stopping_patience ended the run.
        stopped_by_callback: Whether a callback ended the run.
        values: Contents of results.json.
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
        """Return a report of every step, read from metrics.jsonl."""
        return [step_report(record, self.steps) for record in read_steps(self.out / METRICS_FILE)]


class _Results(msgspec.Struct):
    """The part of results.json that has fields in `FinetuneResult`."""

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
    """Read the result of the run in `out`. WgradError: it is not finished, or its files are damaged."""
    path = Path(out, RESULTS_FILE)
    advice = "begin anew in another --out"
    found = msgspec.structs.asdict(read_json(path, _Results, "--out", advice))
    values = read_json(path, dict[str, Any], "--out", advice)
    return FinetuneResult(out=Path(out), values=values, **found | {"stopped_early": bool(found["stopped_early"])})
