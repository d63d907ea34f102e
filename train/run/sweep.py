"""--lr-sweep: short runs with several learning rates from the same start, and a table of their results."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from wgrad.device.errors import UnusableResult
from wgrad.device.files import make_folder, write_json
from wgrad.device.shown import counted
from wgrad.train.output.metrics import MetricsFile
from wgrad.train.output.previous_run import SWEEP_FILE
from wgrad.train.ranks.world import World
from wgrad.train.run.evaluation import Evaluation
from wgrad.train.run.loop import Run
from wgrad.train.run.session import Session
from wgrad.train.step.trainer import Trainer
from wgrad.train.terminal.ending import SWEEP_INTERRUPTED
from wgrad.train.terminal.interrupts import Interrupted, Interrupts
from wgrad.train.terminal.progress import TrainingProgress

FORMAT = 1
STEPS = 50  # of each run without --max-steps
_LAST = 10  # steps whose mean loss is reported


@dataclass(frozen=True)
class Row:
    """Result of one learning rate. loss: mean of the last steps; held_out_loss: after them. None: not finite."""

    lr: float
    loss: float | None
    held_out_loss: float | None
    skipped_steps: int


class Sweep:
    """Runs the sweep. All runs replay the same recorded step: only the learning rate on the device differs."""

    def __init__(self, session: Session, trainer: Trainer, evaluation: Evaluation, interrupts: Interrupts) -> None:
        self.session, self.trainer, self.evaluation, self.interrupts = session, trainer, evaluation, interrupts
        self.world: World = trainer.world
        stream = session.stream
        if session.config.max_steps is None:
            stream.total_steps = min(stream.total_steps, STEPS)

    def run(self) -> None:
        """Write OUT/sweep.json and print the table.

        Raises:
            UnusableResult: After both, no rate has a finite loss.
            Interrupted: The run was asked to end; nothing is written.
        """
        session, rates = self.session, self.session.config.lr_sweep
        session.say(
            f"sweep: {counted(len(rates), 'learning rate')}, {counted(session.stream.total_steps, 'step')} each"
        )
        start = self.trainer.optimizer.state_arrays()
        before = self._held_out("before")
        rows = []
        for lr in rates:
            self.trainer.optimizer.load_state_arrays(start)
            rows.append(self._try(lr))
        finite = [row for row in rows if row.held_out_loss is not None]
        best = min(finite, key=lambda row: row.held_out_loss or 0.0).lr if finite else None
        found = {
            "format": FORMAT,
            "steps": session.stream.total_steps,
            "held_out_loss_before": before,
            "runs": [vars(row) for row in rows],
            "best_lr": best,
        }
        with self.interrupts.writing():
            # The folder may have been removed in the meantime.
            self.world.broadcast(lambda: write_json(make_folder(session.out) / SWEEP_FILE, found), SWEEP_FILE)
        for line in table(rows, before, best):
            session.say(line)
        if best is None:
            raise UnusableResult("no learning rate has a held-out loss that is finite: try lower ones")

    def _try(self, lr: float) -> Row:
        session, trainer, stream = self.session, self.trainer, self.session.stream
        trainer.config = replace(trainer.config, learning_rate=lr, save_steps=0)
        trainer.read_history()  # drop what a failed run has left
        stream.step = 0
        session.say(f"--learning-rate {lr:g}:")
        metrics = MetricsFile(session.out, writes=False)
        progress = TrainingProgress(stream.total_steps, 0, session.config.logging_steps, display=session.display)
        try:
            with self.interrupts.steps(), progress:
                run = Run(trainer, stream, metrics, progress, lambda done: None, self.interrupts)
                self.world.steps_begin()
                try:
                    run.train()
                finally:
                    self.world.steps_end()
                    run.say()
        except Interrupted as asked:
            raise Interrupted(asked.number, SWEEP_INTERRUPTED) from None
        except UnusableResult:
            return Row(lr, None, None, trainer.optimizer.skipped())
        losses = [record["loss"] for record in metrics.records[-_LAST:]]
        mean = sum(losses) / len(losses) if None not in losses else None
        return Row(lr, mean, self._held_out(f"with --learning-rate {lr:g}"), trainer.optimizer.skipped())

    def _held_out(self, when: str) -> float | None:
        measured = self.evaluation.measure(0, when)
        for line in measured.lines:
            self.session.say(line)
        return measured.loss if measured.loss is not None and math.isfinite(measured.loss) else None


def table(rows: list[Row], before: float | None, best: float | None) -> list[str]:
    """Return the table for people."""

    def number(value: float | None) -> str:
        return f"{value:.4f}" if value is not None else "not finite"

    lines = [f"{'learning rate':>14} {'training loss':>14} {'held-out loss':>14}   (before: {number(before)})"]
    for row in rows:
        skipped = f"  {counted(row.skipped_steps, 'step')} skipped" if row.skipped_steps else ""
        mark = "  best" if row.lr == best else ""
        lines.append(f"{row.lr:>14g} {number(row.loss):>14} {number(row.held_out_loss):>14}{mark}{skipped}")
    if best is not None and best in (min(row.lr for row in rows), max(row.lr for row in rows)):
        side = "lower" if best == min(row.lr for row in rows) else "higher"
        lines.append(f"the best is at the end of those tried: {side} ones may be better still")
    return lines
