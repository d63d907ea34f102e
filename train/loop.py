"""The training loop: micro-batches weighed by the step's target tokens, one optimiser step, nothing read back inside.

What changes from step to step is written into arrays that stay (ids, targets, learning rate, ...), so that after a
first run forward, backward and update are recorded once and replayed. Loss and optimiser state of each step are copied
into a history on the device, which is downloaded every `log_every` steps.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np

from wgrad.autograd.device import STATE_GRAD_NORM, STATE_SIZE, STATE_SKIPPED, Device, Later, Replay
from wgrad.autograd.tensor import no_grad
from wgrad.train.config import FinetuneConfig
from wgrad.train.metrics import MetricsFile
from wgrad.train.model import Inputs, Model
from wgrad.train.optim import ALIGN, AdamW
from wgrad.train.packing import Batch, BatchStream, Step
from wgrad.train.progress import TrainingProgress
from wgrad.train.schedule import learning_rate


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

    def __init__(self, model: Model, optimizer: AdamW, config: FinetuneConfig) -> None:
        self.model, self.optimizer, self.config, self.device = model, optimizer, config, model.device
        device, rows, tokens = self.device, config.batch_size, config.seq_len
        flat = (rows * tokens,)
        self.inputs = Inputs(
            ids=device.upload(np.zeros(flat, np.int32)),
            positions=device.upload(np.zeros(flat, np.int32)),
            starts=device.upload(np.zeros((rows, tokens), np.int32)),
            q_start=device.upload(np.zeros(1, np.int32)),
            targets=device.upload(np.zeros(flat, np.int32)),
            seed=device.upload(np.zeros(2, np.uint32)) if self._dropout else None,
        )
        self.eval_inputs = Inputs(**{**vars(self.inputs), "seed": None})
        self._inv_tokens = device.zeros((1,))
        self._loss = device.zeros((1,))  # of the step so far: sum over targets / targets of the step
        self._eval_loss = device.zeros((1,))
        # A row of 2 * ALIGN floats a step: loss at 0, optimiser state at ALIGN (views must be aligned).
        self._history = device.zeros((config.log_every, 2 * ALIGN))
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
        write(inputs.starts, batch.starts)

    def _forward_backward(self) -> None:
        """One micro-batch: gradients and loss are added to what the step has so far."""
        device = self.device
        loss = self.model.loss(self.inputs)
        share = device.mul(loss.data, self._inv_tokens)
        loss.backward(device.mul(self._inv_tokens, self.optimizer.loss_scale))
        device.add(self._loss, share, out=self._loss)

    def step(self, step: Step, lr: float) -> None:
        """One optimiser step. At most `log_every` steps may run between two calls of `read_history`."""
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
        return self.history_later().result()

    def history_later(self) -> HistoryLater:
        """What `read_history` gives, without waiting: further steps may be recorded meanwhile."""
        count, self._recorded = self._recorded, 0
        return HistoryLater(self.device.download_later(self._history), count)

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Mean loss in nats over all targets of the batches, without dropout; NaN where there are none."""
        targets = sum(b.num_targets for b in batches)
        if not targets:
            return float("nan")
        self.device.fill(self._eval_loss, 0.0)
        for batch in batches:
            self._write(batch)
            with no_grad():
                loss = self.model.loss(self.eval_inputs)
            self.device.add(self._eval_loss, loss.data, out=self._eval_loss)
        return float(self.device.download(self._eval_loss)[0]) / targets


class HistoryLater:
    """The history of `count` steps on its way to the host."""

    def __init__(self, rows: Later, count: int) -> None:
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
    """A pass over the steps of a stream, with reports, checkpoints and Ctrl-C.

    save: called with the number of finished steps when a checkpoint is due. total_targets: target tokens seen.
    """

    def __init__(
        self,
        trainer: Trainer,
        stream: BatchStream,
        metrics: MetricsFile,
        progress: TrainingProgress,
        save: Callable[[int], None],
    ) -> None:
        self.trainer, self.stream, self.metrics, self.progress, self.save = trainer, stream, metrics, progress, save
        self.config = trainer.config
        self.skipped = 0
        self._pending: list[_Pending] = []
        self._reads: deque[tuple[list[_Pending], HistoryLater]] = deque()
        self._since = time.monotonic()

    def train(self) -> None:
        """Run to the stream's end. KeyboardInterrupt, after a checkpoint, where the user pressed Ctrl-C."""
        total, every = self.stream.total_steps, self.config.save_every
        with _interruptible() as interrupted:
            self._since = time.monotonic()
            for step in self.stream:
                lr = learning_rate(self.config, step.index, total)
                self.trainer.step(step, lr)
                done = step.index + 1
                self._pending.append(_Pending(done, lr, step.num_tokens))
                if len(self._pending) >= self.config.log_every:
                    self._request()
                self._report(wait=done == total)
                if interrupted():
                    self._save(done)
                    message = f"interrupted after step {done} of {total}, which is saved; go on with --resume"
                    raise KeyboardInterrupt(message)
                if every and done % every == 0 and done < total:
                    self._save(done)

    def _save(self, done: int) -> None:
        self._report(wait=True)
        self.metrics.sync()
        self.save(done)
        self._since = time.monotonic()  # writing a checkpoint is not training

    def _request(self) -> None:
        """Ask for what the steps since the last request gave. The device goes on with the next step meanwhile."""
        if self._pending:
            self._reads.append((self._pending, self.trainer.history_later()))
            self._pending = []

    def _report(self, *, wait: bool) -> None:
        """Write down what has arrived, or with `wait` everything that there is."""
        if wait:
            self._request()
        while self._reads and (wait or self._reads[0][1].ready()):
            pending, history = self._reads.popleft()
            self._write(pending, history.result())

    def _write(self, pending: list[_Pending], history: np.ndarray) -> None:
        now = time.monotonic()
        rate = sum(p.tokens for p in pending) / max(now - self._since, 1e-9)
        self._since = now
        for item, row in zip(pending, history):
            record: dict[str, Any] = {"step": item.step, "loss": float(row[0]), "lr": item.lr}
            norm = float(row[1 + STATE_GRAD_NORM])
            record["grad_norm"] = norm if norm >= 0 else None  # -1: not finite, the step was skipped
            self.metrics.write(record | {"tokens": item.tokens, "tokens_per_second": round(rate, 1)})
        last = pending[-1]
        self.skipped = int(history[-1, 1 + STATE_SKIPPED])
        self.progress.update(last.step, loss=float(history[-1, 0]), lr=last.lr, tokens_per_second=rate)


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C (SIGINT) and SIGTERM set a flag instead of cutting a step in half; a second one ends at once."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def handler(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, old in before.items():
            signal.signal(number, old)
