"""The training loop: micro-batches weighed by the step's target tokens, one optimiser step, nothing read back inside.

What changes from step to step is written into arrays that stay (ids, targets, learning rate, ...), so that after a
first run forward, backward and update are recorded once and replayed. Loss and optimiser state of each step are copied
into a history on the device, which is downloaded a few times a second, and whenever it is full.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.tensor import Tensor, no_grad
from wgrad.device.contract import STATE_GRAD_NORM, STATE_SIZE, Device, Readback, Replay
from wgrad.device.errors import UnusableResult
from wgrad.train.data.packing import Batch, BatchStream, Step
from wgrad.train.model.model import Inputs, Model
from wgrad.train.run.config import RunOptions
from wgrad.train.run.interrupts import Interrupted, Interrupts
from wgrad.train.run.metrics import MetricsFile
from wgrad.train.run.optim import ALIGN, AdamW
from wgrad.train.run.progress import TrainingProgress
from wgrad.train.run.schedule import learning_rate
from wgrad.train.run.throughput import Throughput

HISTORY_STEPS = 64  # steps that the device keeps at most before they are asked for
REPORT_SECONDS = 0.25  # between requests for what the device has done, whatever --log-every is
MANY_SKIPPED = 20  # steps in a row without an update, from which on it is said what to try


class Recorded:
    """Device work of unchanged shapes: run as it is the first time, recorded the second, replayed from then on.

    The first run compiles the pipelines and grows the memory pool, so that the recording holds neither. The work is
    given at each call and not kept: a kept method of the owner would be a cycle, and hold the owner's device memory.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._runs = 0
        self._replay: Replay | None = None

    def __call__(self, work: Callable[[], None]) -> None:
        if self._replay is not None:
            self._replay.run()
            return
        if self._runs:
            with self._device.capture() as replay:
                work()
            self._replay = replay
        else:
            work()
        self._runs += 1


class Trainer:
    """Runs optimiser steps and evaluations of a model on persistent inputs of [batch_size, seq_len]."""

    def __init__(self, model: Model, optimizer: AdamW, config: RunOptions) -> None:
        self.model, self.optimizer, self.config, self.device = model, optimizer, config, model.device
        device, rows, tokens = self.device, config.batch_size, config.seq_len
        flat = (rows * tokens,)
        self.inputs = Inputs(
            ids=device.upload(np.zeros(flat, np.int32)),
            positions=device.upload(np.zeros(flat, np.int32)),
            doc_start=device.upload(np.zeros((rows, tokens), np.int32)),
            cache_len=device.upload(np.zeros(1, np.int32)),
            targets=device.upload(np.zeros(flat, np.int32)),
            seed=device.upload(np.zeros(2, np.uint32)) if self._dropout else None,
        )
        self.eval_inputs = Inputs(**{**vars(self.inputs), "seed": None})
        self._inv_tokens = device.zeros((1,))
        self._loss = device.zeros((1,))  # of the step so far: sum over targets / targets of the step
        self._eval_loss = device.zeros((1,))
        # A row of 2 * ALIGN floats a step: loss at 0, optimiser state at ALIGN (views must be aligned).
        self.history_steps = min(config.log_every, HISTORY_STEPS)
        self._history = device.zeros((self.history_steps, 2 * ALIGN))
        self._recorded = 0
        self._micro_step, self._update = Recorded(device), Recorded(device)

    @property
    def _dropout(self) -> bool:
        return self.model.adapter is not None and self.model.adapter.config.dropout > 0

    def _write(self, batch: Batch) -> None:
        write, inputs = self.device.write, self.inputs
        write(inputs.ids, batch.ids.reshape(-1))
        write(inputs.targets, batch.targets.reshape(-1))
        write(inputs.positions, batch.positions.reshape(-1))
        write(inputs.doc_start, batch.doc_start)

    def _forward_backward(self) -> None:
        """One micro-batch: gradients and loss are added to what the step has so far."""
        device = self.device
        loss = self.model.loss(self.inputs)
        inv_tokens = Tensor(self._inv_tokens, device)
        share = F.mul(Tensor(loss.data, device), self._inv_tokens)
        loss.backward(F.mul(inv_tokens, self.optimizer.loss_scale).data)
        F.add_to(device, self._loss, share.data)

    def step(self, step: Step, lr: float) -> None:
        """One optimiser step. At most `history_steps` may run between two calls of `read_history`."""
        device = self.device
        self.optimizer.set_lr(lr)
        device.write(self._inv_tokens, np.array([1.0 / step.num_targets], np.float32))
        for number, batch in enumerate(step.batches):
            self._write(batch)
            if self.inputs.seed is not None:
                micro = step.index * self.config.accumulate + number
                device.write(self.inputs.seed, np.array([self.config.seed, micro], np.uint32))
            self._micro_step(self._forward_backward)
        self._update(self.optimizer.step)
        at = self._recorded * 2 * ALIGN
        device.copy(self._loss, device.view(self._history, (1,), at))
        device.copy(self.optimizer.state, device.view(self._history, (STATE_SIZE,), at + ALIGN))
        device.fill(self._loss, 0.0)
        self._recorded += 1

    def read_history(self) -> np.ndarray:
        """Wait for the device -> float32 [steps since the last call, 1 + STATE_SIZE]: loss, optimiser state."""
        return self.history_readback().result()

    def history_readback(self) -> HistoryReadback:
        """What `read_history` gives, without waiting: further steps may be recorded meanwhile."""
        count, self._recorded = self._recorded, 0
        return HistoryReadback(self.device.readback(self._history), count)

    def evaluate(self, batches: Sequence[Batch], progress: Callable[[int], None] | None = None) -> float:
        """Mean loss in nats over all targets of the batches, without dropout; NaN where there are none.

        progress: called with the number of batches that are known to be finished; the device has one more to do.
        """
        targets = sum(b.num_targets for b in batches)
        if not targets:
            return float("nan")
        self.device.fill(self._eval_loss, 0.0)
        before: Readback | None = None
        for number, batch in enumerate(batches):
            self._write(batch)
            with no_grad():
                loss = self.model.loss(self.eval_inputs)
            F.add_to(self.device, self._eval_loss, loss.data)
            if progress is not None:
                if before is not None:
                    before.result()
                    progress(number)
                before = self.device.readback(self._eval_loss)
        return float(self.device.download(self._eval_loss)[0]) / targets


class HistoryReadback:
    """The history of `count` steps on its way to the host."""

    def __init__(self, rows: Readback, count: int) -> None:
        self._rows, self._count = rows, count

    def ready(self) -> bool:
        return self._rows.ready()

    def result(self) -> np.ndarray:
        rows = self._rows.result()[: self._count]
        return np.concatenate([rows[:, :1], rows[:, ALIGN : ALIGN + STATE_SIZE]], axis=1)


@dataclass
class _Pending:
    """A step whose loss is still on the device."""

    step: int
    lr: float
    tokens: int


class Run:
    """A pass over the steps of a stream, with reports and checkpoints; ends early, saved, where `interrupts` was asked.

    save: called with the number of finished steps when a checkpoint is due. What is to be kept is written before
    anything is said of it: to say it may take as long as somebody leaves a pipe full. So what there is to say of the
    last step waits for `say`.
    """

    def __init__(
        self,
        trainer: Trainer,
        stream: BatchStream,
        metrics: MetricsFile,
        progress: TrainingProgress,
        save: Callable[[int], None],
        interrupts: Interrupts,
    ) -> None:
        self.trainer, self.stream, self.metrics, self.progress, self.save = trainer, stream, metrics, progress, save
        self.config, self.interrupts = trainer.config, interrupts
        self._skips = SkippedInARow(metrics.records)
        self._unsaid: list[Callable[[], None]] = []
        self._pending: list[_Pending] = []
        self._reads: deque[tuple[list[_Pending], HistoryReadback]] = deque()
        self._clock = progress.display.clock
        self.throughput = Throughput(self._clock)
        self._requested = -math.inf  # when

    def train(self) -> None:
        """Run to the stream's end. Interrupted, after a checkpoint, where that was asked before the last step.

        UnusableResult where the parameters are found not to be finite.
        """
        total, every = self.stream.total_steps, self.config.save_every
        self.throughput.start()
        for step in self.stream:
            lr = learning_rate(self.config, step.index, total)
            self.trainer.step(step, lr)
            done = step.index + 1
            self._pending.append(_Pending(done, lr, step.num_tokens))
            first = self._requested == -math.inf
            if len(self._pending) >= self.trainer.history_steps or self._clock() - self._requested >= REPORT_SECONDS:
                self._request()
            self._collect(wait=first or done == total)
            if done == total:
                return
            saved = (every and done % every == 0) or self.interrupts.asked is not None
            if saved:
                self._save(done)
            self.say()
            if self.interrupts.asked is not None:
                if not saved:  # asked while it was said
                    self._save(done)
                message = f"interrupted after step {done} of {total}, which is saved; go on with --resume"
                raise Interrupted(self.interrupts.asked, message)

    def _save(self, done: int) -> None:
        with self.interrupts.writing():
            self._collect(wait=True)
            with self.throughput.pause():  # writing a checkpoint is not training
                self.metrics.sync()
                self.save(done)

    def _request(self) -> None:
        """Ask for what the steps since the last request gave. The device goes on with the next step meanwhile."""
        if self._pending:
            self._reads.append((self._pending, self.trainer.history_readback()))
            self._pending, self._requested = [], self._clock()

    def _collect(self, *, wait: bool) -> None:
        """Write down what has arrived, or with `wait` everything that there is."""
        if wait:
            self._request()
        arrived = []
        while self._reads and (wait or self._reads[0][1].ready()):
            pending, history = self._reads.popleft()
            arrived.append((pending, history.result()))
        steps = [item for pending, _ in arrived for item in pending]
        if steps:  # all of them are seen to be finished now, and none is timed by itself
            self.throughput.finished(len(steps), sum(item.tokens for item in steps))
        for pending, rows in arrived:
            self._write(pending, rows)

    def say(self) -> None:
        """Report what was collected and not yet told."""
        while self._unsaid:
            self._unsaid.pop(0)()

    def _write(self, pending: list[_Pending], history: np.ndarray) -> None:
        rate = self.throughput.tokens_per_second
        for item, row in zip(pending, history):
            record: dict[str, Any] = {"step": item.step, "loss": float(row[0]), "lr": item.lr}
            norm = float(row[1 + STATE_GRAD_NORM])
            record["grad_norm"] = norm if norm >= 0 else None  # -1: not finite, the step was skipped
            self.metrics.write(record | {"tokens": item.tokens, "tokens_per_second": float(f"{rate:.4g}")})
            if self._skips.add(norm < 0):
                self._many_skipped(item.step)
        last, loss = pending[-1], float(history[-1, 0])
        left = self.throughput.seconds_per_step * (self.stream.total_steps - last.step)
        self._unsaid.append(
            lambda: self.progress.update(last.step, loss=loss, lr=last.lr, tokens_per_second=rate, left=left),
        )

    def _many_skipped(self, step: int) -> None:
        if not self.trainer.optimizer.finite():  # nor will they be again
            raise not_finite(step, self.config)
        note = (
            f"note: {self._skips.count} steps in a row, up to {step}, were skipped, because no gradient was finite: if "
            f"that goes on, {what_to_try(self.config)}"
        )
        self._unsaid.append(lambda: self.progress.note(note))


class SkippedInARow:
    """Counts steps without an update, from what earlier records end in."""

    def __init__(self, records: Sequence[Mapping[str, Any]]) -> None:
        self.count = 0
        for record in records:
            self.add(record.get("grad_norm", 0.0) is None)

    def add(self, skipped: bool) -> bool:
        """-> whether it is time for a word: at 20 in a row, and then at each doubling."""
        self.count = self.count + 1 if skipped else 0
        return self.count in (MANY_SKIPPED << i for i in range(32))


def what_to_try(config: RunOptions) -> str:
    """What may help where gradients are not finite."""
    if config.compute == "float16":
        return "begin anew in another --out with --compute float32 (or bfloat16, on HIP), or a lower --lr"
    clipping = "" if config.max_grad_norm else " and --max-grad-norm 1"
    return f"--resume with a lower --lr than {config.lr:g}{clipping} goes on from the last checkpoint"


def not_finite(step: int, config: RunOptions) -> UnusableResult:
    """What is said of parameters with NaN or infinity among them, after `step` steps."""
    return UnusableResult(
        f"after step {step} what is trained is not finite: it is neither saved nor written as a result: "
        f"{what_to_try(config)}"
    )
