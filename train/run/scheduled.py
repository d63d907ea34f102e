"""Evaluations during a run (--eval-steps): when they are due, which steps are the best, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.output.metrics import MetricsFile
from wgrad.train.run.evaluation import Evaluation


class BestSteps:
    """The held-out losses of a run so far, by step. A resumed run has the same ones as an uninterrupted run."""

    def __init__(self, config: RunOptions, losses: Iterable[tuple[int, float | None]] = ()) -> None:
        self.config = config
        self.losses = {step: math.nan if loss is None else loss for step, loss in losses}

    def saved(self) -> list[tuple[int, float | None]]:
        """Return the losses for a checkpoint; None stands for one that is not finite."""
        return [(step, loss if math.isfinite(loss) else None) for step, loss in self.losses.items()]

    def due(self, step: int) -> bool:
        """Return whether the loss is to be measured after `step` steps."""
        every = self.config.eval_steps
        return every > 0 and step > 0 and step % every == 0 and step not in self.losses

    def best(self) -> list[int]:
        """Return the steps with a finite loss, the lowest loss first, and of equal losses the earlier step first."""
        return sorted((s for s, loss in self.losses.items() if math.isfinite(loss)), key=lambda s: (self.losses[s], s))

    def kept(self) -> list[int]:
        """Return the steps whose checkpoints are kept for their loss."""
        return self.best()[: self.config.best_kept]

    @property
    def without_better(self) -> int:
        """Number of evaluations since the best one."""
        best = self.best()[:1]
        return sum(step > best[0] for step in self.losses) if best else len(self.losses)

    @property
    def stop(self) -> bool:
        """Return whether --early-stopping-patience is exhausted."""
        return 0 < self.config.early_stopping_patience <= self.without_better

    def why_stopped(self) -> str:
        """Return the reason for people, if `stop` is true."""
        best, last = self.best()[:1], max(self.losses)
        than = f"better loss than {self.losses[best[0]]:.4f} (step {best[0]})" if best else "loss that is finite"
        return f"stopped early after step {last}: {self.without_better} measures without a {than}"


class Scheduled:
    """Evaluations between two steps of the training loop. asked: returns whether the run was asked to end."""

    def __init__(
        self, evaluation: Evaluation, metrics: MetricsFile, steps: BestSteps, asked: Callable[[], bool]
    ) -> None:
        self.evaluation, self.metrics, self.steps, self._asked = evaluation, metrics, steps, asked

    def measure(self, step: int) -> list[str]:
        """Evaluate, record the loss, and return lines for people. GivenUp: the run was asked to end."""
        measured = self.evaluation.measure(step, f"at step {step}", asked=self._asked)
        assert measured.loss is not None  # --eval-steps requires held-out data
        self.metrics.write_held_out(step, measured.loss, measured.metrics)
        self.steps.losses[step] = measured.loss
        return measured.lines
