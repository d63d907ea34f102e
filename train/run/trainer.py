"""Optimiser steps: micro-batches weighed by the step's target tokens, one update, nothing read back inside.

What changes from step to step is written into arrays that stay (ids, targets, learning rate, ...), so that after a
first run forward, backward and update are recorded once and replayed. Loss and optimiser state of each step are copied
into a history on the device, which is downloaded a few times a second, and whenever it is full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.ops.optimizer import STATE_SIZE
from wgrad.autograd.replay import Recorded
from wgrad.autograd.tensor import Tensor, no_grad
from wgrad.device.contract import Readback
from wgrad.train.data.packing import Batch, Step
from wgrad.train.model.model import Inputs, Model
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.ranks.data_parallel import DataParallel
from wgrad.train.ranks.world import RanksLost, World
from wgrad.train.run.buckets import buckets_of
from wgrad.train.run.diloco import DiLoCo
from wgrad.train.run.optim import ALIGN, AdamW

ROUNDED_AWAY = "exchange_error"  # its name in a checkpoint
HISTORY_STEPS = 64  # steps that the device keeps at most before they are asked for


class Trainer:
    """Runs optimiser steps and evaluations of a model on persistent inputs of [batch_size, seq_len].

    world: the ranks that share each step and each evaluation.
    """

    def __init__(self, model: Model, optimizer: AdamW, config: RunOptions, world: World | None = None) -> None:
        self.model, self.optimizer, self.config, self.device = model, optimizer, config, model.device
        self.world = World() if world is None else world
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
        self.diloco = DiLoCo(self.world, optimizer) if config.sync_every > 1 else None
        buckets = self._buckets() if self.diloco is None else []
        self.data_parallel = DataParallel(
            self.world, config.accumulate, device, optimizer.parameters.grad, buckets, config.exchange_bits == 16
        )

    def _buckets(self) -> list[tuple[int, int]]:
        """Where the flat gradient is cut so that parts of it travel while the backward goes on, which is recorded in as
        many parts. Layers whose inputs or weights come from main memory are recorded whole."""
        buckets = buckets_of(self.optimizer.parameters)
        if not self.world.alone and not self.model.moves:
            self.model.passed = {bucket.layer: self._micro_step.cut for bucket in buckets if bucket.layer}
        return [(bucket.begin, bucket.end) for bucket in buckets]

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
        device.add(self._loss, share.data, out=self._loss)

    def step(self, step: Step, lr: float) -> None:
        """One optimiser step. At most `history_steps` may run between two calls of `read_history`.

        RanksLost: no rank did the step.
        """
        device = self.device
        self.optimizer.set_lr(lr)
        share = self.data_parallel.share(step.batches)
        targets = step.num_targets if self.diloco is None else sum(batch.num_targets for _, batch in share)
        device.write(self._inv_tokens, np.array([1.0 / max(targets, 1)], np.float32))
        for number, batch in share:
            self._write(batch)
            if self.inputs.seed is not None:
                micro = step.index * self.config.accumulate + number
                device.write(self.inputs.seed, np.array([self.config.seed, micro], np.uint32))
            last = number == share[-1][0] and self.diloco is None
            self._micro_step(self._forward_backward, self.data_parallel.part_submitted if last else None)
        if self.diloco is None:
            self._sum_gradient()
        else:
            self.diloco.targets += targets
        if targets:
            self._update(self.optimizer.step)
        at = self._recorded * 2 * ALIGN
        device.copy(self._loss, device.view(self._history, (1,), at))
        device.copy(self.optimizer.state, device.view(self._history, (STATE_SIZE,), at + ALIGN))
        device.fill(self._loss, 0.0)
        self._recorded += 1

    def _sum_gradient(self) -> None:
        try:
            self.data_parallel.sum_gradient(self._loss)
        except RanksLost:
            self.device.fill(self.optimizer.parameters.grad, 0.0)
            self.device.fill(self._loss, 0.0)
            raise

    def read_history(self) -> np.ndarray:
        """Wait for the device -> float32 [steps since the last call, 1 + STATE_SIZE]: loss, optimiser state."""
        return self.history_readback().result()

    def history_readback(self) -> HistoryReadback:
        """What `read_history` gives, without waiting: further steps may be recorded meanwhile."""
        count, self._recorded = self._recorded, 0
        return HistoryReadback(self.device.readback(self._history), count)

    def exchange_arrays(self) -> dict[str, np.ndarray]:
        """What a checkpoint holds of the exchange of gradients, after `share_error`."""
        error = self.data_parallel.error
        return {} if error is None else {ROUNDED_AWAY: self.optimizer.parameters.to_file(error)}

    def restore_exchange(self, arrays: dict[str, np.ndarray]) -> None:
        """The inverse of `exchange_arrays`; other runs' checkpoints have none."""
        if ROUNDED_AWAY in arrays:
            self.data_parallel.restore_error(self.optimizer.parameters.from_file(arrays[ROUNDED_AWAY]))

    def evaluate(self, batches: Sequence[Batch], progress: Callable[[int], None] | None = None) -> float:
        """Mean loss in nats over all targets of the batches, without dropout; NaN where there are none.

        progress: called with the number of batches of this rank that are known to be finished; the device has one more
        to do.
        """
        targets = sum(b.num_targets for b in batches)
        if not targets:
            return float("nan")
        while True:
            mine = batches[self.world.rank :: self.world.size]
            try:
                return self.world.total(self._evaluate(mine, progress), "the held-out loss") / targets
            except RanksLost:
                continue  # those that are left share it anew

    def _evaluate(self, batches: Sequence[Batch], progress: Callable[[int], None] | None) -> float:
        """The sum of the loss over the batches' targets."""
        self.device.fill(self._eval_loss, 0.0)
        before: Readback | None = None
        for number, batch in enumerate(batches):
            self._write(batch)
            with no_grad():
                loss = self.model.loss(self.eval_inputs)
            self.device.add(self._eval_loss, loss.data, out=self._eval_loss)
            if progress is not None:
                if before is not None:
                    before.result()
                    progress(number)
                before = self.device.readback(self._eval_loss)
        return float(self.device.download(self._eval_loss)[0])


class HistoryReadback:
    """The history of `count` steps on its way to the host."""

    def __init__(self, rows: Readback, count: int) -> None:
        self._rows, self._count = rows, count

    def ready(self) -> bool:
        return self._rows.ready()

    def result(self) -> np.ndarray:
        rows = self._rows.result()[: self._count]
        return np.concatenate([rows[:, :1], rows[:, ALIGN : ALIGN + STATE_SIZE]], axis=1)
