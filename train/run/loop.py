"""The training loop: steps, progress reports, checkpoints, and warnings about skipped steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from wgrad.autograd.ops.optimizer import STATE_GRAD_NORM
from wgrad.device.errors import UnusableResult
from wgrad.train.data.packing import BatchStream
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.output.callbacks import Callbacks, step_report
from wgrad.train.output.metrics import MetricsFile
from wgrad.train.ranks.world import RanksLost
from wgrad.train.run.evaluation import GivenUp
from wgrad.train.run.kept_state import KeptState
from wgrad.train.run.schedule import learning_rate
from wgrad.train.run.scheduled import Scheduled
from wgrad.train.run.throughput import Throughput
from wgrad.train.step.optim import AdamW
from wgrad.train.step.trainer import HistoryReadback, Trainer
from wgrad.train.terminal.interrupts import Interrupted, Interrupts
from wgrad.train.terminal.progress import TrainingProgress

REPORT_SECONDS = 0.25  # between downloads of the device's history, whatever --logging-steps is
MANY_SKIPPED = 20  # steps in a row without an update, after which a note gives advice


@dataclass
class _Pending:
    """A step whose loss is still on the device."""

    step: int
    lr: float
    tokens: int


class Run:
    """Trains on the steps of a stream, with reports, checkpoints and evaluations.

    Ends early when `interrupts` was asked to end (after a checkpoint), or when an evaluation or a callback stops it.
    Files are written before lines are printed, because printing into a full pipe blocks. So the lines about the last
    step wait for `say`.

    Args:
        trainer: Runs the steps.
        stream: Yields the steps.
        metrics: File of the records of steps.
        progress: Bar or lines for people.
        save: Called with the number of finished steps when a checkpoint is due.
        interrupts: Requests to end the run.
        scheduled: Evaluations during the run; None: there are none.
        callbacks: Called with each step.
        kept: Keeps the newest state in main memory; None: nothing does.
    """

    def __init__(
        self,
        trainer: Trainer,
        stream: BatchStream,
        metrics: MetricsFile,
        progress: TrainingProgress,
        save: Callable[[int], None],
        interrupts: Interrupts,
        scheduled: Scheduled | None = None,
        callbacks: Callbacks | None = None,
        kept: KeptState | None = None,
    ) -> None:
        self.trainer, self.stream, self.metrics, self.progress, self.save = trainer, stream, metrics, progress, save
        self.config, self.interrupts, self.scheduled, self.kept = trainer.config, interrupts, scheduled, kept
        self.callbacks = Callbacks() if callbacks is None else callbacks
        self._skips = SkippedInARow(metrics.of_steps())
        self._unsaid: list[Callable[[], None]] = []
        self._pending: list[_Pending] = []
        self._reads: deque[tuple[list[_Pending], HistoryReadback]] = deque()
        self._clock = progress.display.clock
        self.throughput = Throughput(self._clock)
        self._requested = -math.inf  # when
        self._written = stream.step  # the last step whose record is written

    def train(self) -> None:
        """Run to the stream's end, or until an evaluation or a callback stops it.

        Raises:
            Interrupted: The run was asked to end before the last step; a checkpoint is saved.
            UnusableResult: Parameters are no longer finite.
        """
        total, every = self.stream.total_steps, self.config.save_steps
        self.throughput.start()
        if 0 < self.stream.step < total:  # resumed: a request to end may have prevented this evaluation
            self._measure(self.stream.step)
            if self._stopped:
                return
            if (asked := self._asked()) is not None:
                raise self._interrupted(asked, self.stream.step)
        for step in self.stream:
            lr = self.callbacks.rate(step.index + 1, total, learning_rate(self.config, step.index, total))
            try:
                self.trainer.data_parallel.asked_here = self.interrupts.asked
                self.trainer.step(step, lr)
            except RanksLost:  # no rank did the step: the remaining ones repeat it
                self.stream.step = step.index
                continue
            if news := self.trainer.data_parallel.news:
                self._unsaid.append(partial(self.progress.note, news))
            done = step.index + 1
            self._pending.append(_Pending(done, lr, step.num_tokens))
            first = self._requested == -math.inf
            if len(self._pending) >= self.trainer.history_steps or self._clock() - self._requested >= REPORT_SECONDS:
                self._request()
            self._collect(wait=first or done == total or bool(self.callbacks))
            if done == total:
                return
            due = self._measure(done) or bool(every and done % every == 0)
            if self._stopped:
                return
            asked = self._asked()
            saved = due or asked is not None
            if saved:
                self._save(done)
            elif self.kept is not None and self.kept.due:
                self._request()
                self.kept.begin(done)
            self.say()
            asked = self._asked()
            if asked is not None:
                if not saved:  # asked while the lines were printed
                    self._save(done)
                self.trainer.world.steps_end()
                raise self._interrupted(asked, done)

    def _interrupted(self, asked: int, done: int) -> Interrupted:
        total = self.stream.total_steps
        return Interrupted(asked, f"interrupted after step {done} of {total}, which is saved; go on with --resume")

    def _measure(self, done: int) -> bool:
        """Evaluate if that is due and the run was not asked to end. Return whether the step is one of the best, whose
        checkpoints are kept."""
        scheduled = self.scheduled
        if scheduled is None or not scheduled.steps.due(done) or self._asked() is not None:
            return False
        self._collect(wait=True)
        try:
            with self.throughput.pause():
                lines = scheduled.measure(done)
        except GivenUp:  # the resumed run repeats it
            return False
        self._unsaid.append(lambda: self.progress.note("\n".join(lines)))
        return done in scheduled.steps.kept()

    @property
    def _stopped(self) -> bool:
        return self.callbacks.stop or (self.scheduled is not None and self.scheduled.steps.stop)

    def _asked(self) -> int | None:
        """Return the signal that asked this run to end, on any rank; None: none did."""
        if self.trainer.world.alone:
            return self.interrupts.asked
        return self.trainer.data_parallel.asked

    def _save(self, done: int) -> None:
        with self.interrupts.writing():
            self._collect(wait=True)
            with self.throughput.pause():  # writing a checkpoint is not training
                self.metrics.sync()
                self.save(done)

    def _request(self) -> None:
        """Start to download the results of the steps since the last request; the device continues meanwhile."""
        if self._pending:
            self._reads.append((self._pending, self.trainer.history_readback()))
            self._pending, self._requested = [], self._clock()

    def _collect(self, *, wait: bool) -> None:
        """Write the records of the steps whose results have arrived; with `wait`, of all steps."""
        if wait:
            self._request()
        arrived = []
        while self._reads and (wait or self._reads[0][1].ready()):
            pending, history = self._reads.popleft()
            arrived.append((pending, history.result()))
        steps = [item for pending, _ in arrived for item in pending]
        if steps:  # they are timed together: the host learns only now that all are finished
            self.throughput.finished(len(steps), sum(item.tokens for item in steps))
        for pending, rows in arrived:
            self._write(pending, rows)
        if self.kept is not None:
            self.kept.look(self._written)

    def say(self) -> None:
        """Print the lines that were held back."""
        while self._unsaid:
            self._unsaid.pop(0)()

    def _write(self, pending: list[_Pending], history: np.ndarray) -> None:
        rate = self.throughput.tokens_per_second
        memory = {} if self.progress.memory is None else {"memory_bytes": self.progress.memory()}
        for item, row in zip(pending, history):
            record: dict[str, Any] = {"step": item.step, "loss": float(row[0]), "lr": item.lr}
            norm = float(row[1 + STATE_GRAD_NORM])
            record["grad_norm"] = norm if norm >= 0 else None  # -1: not finite, the step was skipped
            record |= self.trainer.metrics(row)
            record |= {"tokens": item.tokens, "tokens_per_second": float(f"{rate:.4g}"), **memory}
            self.metrics.write(record)
            self.callbacks.step(step_report(record, self.stream.total_steps))
            if self._skips.add(norm < 0):
                self._many_skipped(item.step)
        last, loss = pending[-1], float(history[-1, 0])
        self._written = last.step
        left = self.throughput.seconds_per_step * (self.stream.total_steps - last.step)
        self._unsaid.append(
            lambda: self.progress.update(last.step, loss=loss, lr=last.lr, tokens_per_second=rate, left=left),
        )

    def _many_skipped(self, step: int) -> None:
        if not self.trainer.optimizer.finite():  # no later step can repair that
            raise not_finite(step, self.config)
        note = (
            f"note: {self._skips.count} steps in a row, up to {step}, were skipped, because no gradient was finite: if "
            f"that goes on, {what_to_try(self.config)}"
        )
        self._unsaid.append(lambda: self.progress.note(note))


class SkippedInARow:
    """Counts consecutive steps without an update, starting from the records of an earlier process."""

    def __init__(self, records: Sequence[Mapping[str, Any]]) -> None:
        self.count = 0
        for record in records:
            self.add(record.get("grad_norm", 0.0) is None)

    def add(self, skipped: bool) -> bool:
        """Count a step. Return whether to warn: at 20 in a row, and then at each doubling."""
        self.count = self.count + 1 if skipped else 0
        return self.count in (MANY_SKIPPED << i for i in range(32))


def what_to_try(config: RunOptions) -> str:
    """Return advice for gradients that are not finite."""
    if config.compute == "float16":
        return "begin anew in another --out with --compute float32 (or bfloat16, on HIP), or a lower --learning-rate"
    clipping = "" if config.max_grad_norm else " and --max-grad-norm 1"
    return (
        f"--resume with a lower --learning-rate than {config.learning_rate:g}{clipping} "
        f"goes on from the last checkpoint"
    )


def not_finite(step: int, config: RunOptions) -> UnusableResult:
    """Return the message about parameters that are not finite after `step` steps."""
    return UnusableResult(
        f"after step {step} what is trained is not finite: it is neither saved nor written as a result: "
        f"{what_to_try(config)}"
    )


def check_result(optimizer: AdamW, done: int, config: RunOptions) -> None:
    """Raise UnusableResult if the parameters after the last step are not finite, or were never updated."""
    if not optimizer.finite():
        raise not_finite(done, config)
    if not optimizer.applied():
        raise UnusableResult(
            f"{'the only step was' if done == 1 else f'all {done} steps were'} skipped, because no gradient was "
            f"finite: nothing was trained, and no result is written: {what_to_try(config)}"
        )
