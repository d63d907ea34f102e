"""Optimizer steps: micro-batches weighted by the step's target tokens, then one update, with nothing read back.

Values that change from step to step (ids, targets, learning rate, ...) are written into persistent arrays. So forward,
backward and update are recorded once and then replayed. Loss and optimizer state of each step are copied into a history
on the device, which is downloaded a few times a second, and whenever it is full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.ops.optimizer import STATE_SIZE
from wgrad.autograd.replay import Recorded, Repeated
from wgrad.autograd.tensor import Tensor, no_grad
from wgrad.device.contract import Readback
from wgrad.device.errors import OutOfMemory
from wgrad.train.data.packing import Batch, Step
from wgrad.train.model.model import Model
from wgrad.train.model.model_inputs import Inputs
from wgrad.train.model.projections import NOTHING
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.ranks.data_parallel import DataParallel
from wgrad.train.ranks.world import RanksLost, World
from wgrad.train.step.buckets import buckets_of
from wgrad.train.step.dequantized import Dequantized, keep_dequantized
from wgrad.train.step.hooks import CallersLoss, LossFunction
from wgrad.train.step.objectives import make_loss, write_batch
from wgrad.train.step.optim import ALIGN, AdamW

HISTORY_STEPS = 64  # most steps that the device's history holds between downloads


class Trainer:
    """Runs optimizer steps and evaluations of a model on persistent inputs of [rows, seq_len].

    Args:
        model: Model to train.
        optimizer: Optimizer of its parameters.
        config: Options of the run.
        world: Ranks that share each step and each evaluation; None: this process is alone.
        loss: Custom loss, in place of that of --objective.
        say: Prints a line. If None, as in a plan, a lack of memory is an error; else the trainer uses less and says so.
    """

    def __init__(
        self,
        model: Model,
        optimizer: AdamW,
        config: RunOptions,
        world: World | None = None,
        loss: LossFunction | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._say = say
        self.model, self.optimizer, self.config, self.device = model, optimizer, config, model.device
        self.world = World() if world is None else world
        device = self.device
        self.eval_inputs = Inputs.empty(model, config.rows, config.max_length)
        seed = device.upload(np.zeros(2, np.uint32)) if self._dropout else None
        self.inputs = replace(self.eval_inputs, seed=seed)
        self.objective = make_loss(model, config) if loss is None else CallersLoss(model, config, loss)
        self._inv_targets = device.zeros((1,))
        # Summed over ranks after a step. At 0: the loss so far (sum over targets / targets of the step). From ALIGN on:
        # the scores of each micro-batch, if the objective has any (views must be aligned).
        scores = config.gradient_accumulation_steps * self.objective.score_size
        self._told = device.zeros((ALIGN + scores if scores else 1,))
        self._loss = device.view(self._told, (1,), 0)
        self._eval_loss = device.zeros((1,))
        # One row per step: loss at 0, optimizer state at ALIGN, scores at 2 * ALIGN.
        self.history_steps = min(config.logging_steps, HISTORY_STEPS)
        self._history = device.zeros((self.history_steps, 2 * ALIGN + scores))
        self._recorded, self._began = 0, False
        self.dequantized = self._kept_dequantized()
        self._micro_step, self._update, self._evaluation = Recorded(device), Recorded(device), Repeated(device)
        self.data_parallel = DataParallel(
            self.world,
            config.gradient_accumulation_steps,
            device,
            optimizer.parameters.grad,
            self._buckets(),
            told=self._told.size,
        )

    def _kept_dequantized(self) -> Dequantized:
        """Dequantize the weights that the run keeps; none if memory is too small."""
        try:
            return keep_dequantized(self.model, self.config)
        except OutOfMemory:
            if self._say is None:
                raise
        self.device.forget_dequantized()
        self._say("note: there is too little memory to keep dequantized weights: each pass dequantizes them")
        return Dequantized()

    def _buckets(self) -> list[tuple[int, int]]:
        """Return the ranges of the flat gradient that are summed over ranks while the backward continues, and have the
        backward recorded in as many parts.

        It is recorded whole if inputs or weights of layers come from main memory.
        """
        buckets = buckets_of(self.optimizer.parameters)
        if not self.world.alone and not self.model.moves:
            self.model.passed = {bucket.layer: self._micro_step.cut for bucket in buckets if bucket.layer}
        return [(bucket.begin, bucket.end) for bucket in buckets]

    @property
    def _dropout(self) -> bool:
        return self.model.adapter is not None and self.model.adapter.config.dropout > 0

    def written(self, batch: Batch) -> Inputs:
        """Write a batch to the device and return it as inputs of an evaluation."""
        self._write(batch)
        return self.eval_inputs

    def _write(self, batch: Batch) -> None:
        write_batch(self.device, self.inputs, batch, self.objective.targets(batch))
        self.objective.write(batch)

    def _forward_backward(self) -> None:
        """Run one micro-batch, and add its gradients and loss to those of the step."""
        device = self.device
        loss = self.objective.loss(self.inputs)
        inv_targets = Tensor(self._inv_targets, device)
        share = F.mul(Tensor(loss.data, device), self._inv_targets)
        loss.backward(F.mul(inv_targets, self.optimizer.loss_scale).data)
        device.add(self._loss, share.data, out=self._loss)

    def _run_micro_step(self, submitted: Callable[[int], None] | None) -> None:
        """Run forward and backward. If the first micro-batch runs out of memory, recompute all layers from then on."""
        lacks_memory = False
        try:
            self._micro_step(self._forward_backward, submitted)
        except OutOfMemory:
            all_recomputed = self.model.recomputed == self.model.config.num_hidden_layers
            least = all_recomputed and not self.dequantized.nbytes and not any(self.model.kept)
            if self._say is None or self._began or not self.world.alone or least:
                raise
            lacks_memory = True
        if lacks_memory:  # outside `except`, because the error's traceback keeps the tape alive
            assert self._say is not None
            self._say("note: the first step finds too little memory: all layers are recomputed from here on")
            self.device.forget_dequantized()
            self.dequantized = Dequantized()
            self.model.recompute, self.model.kept, self._micro_step = True, NOTHING, Recorded(self.device)
            for array in (self.optimizer.parameters.grad, self._told):
                self.device.fill(array, 0.0)
            self._micro_step(self._forward_backward, submitted)
        self._began = True

    def step(self, step: Step, lr: float) -> None:
        """Run one optimizer step. At most `history_steps` may run between two calls of `read_history`.

        Raises:
            RanksLost: A rank was lost, and no rank did the step.
        """
        device = self.device
        self.optimizer.set_lr(lr)
        share = self.data_parallel.share(step.batches)
        targets = sum(batch.num_targets for batch in step.batches)
        self.objective.begin(step.batches)
        device.write(self._inv_targets, np.array([1.0 / max(targets, 1)], np.float32))
        for number, batch in share:
            self._write(batch)
            if self.inputs.seed is not None:
                micro = step.index * self.config.gradient_accumulation_steps + number
                device.write(self.inputs.seed, np.array([self.config.seed, micro], np.uint32))
            last = number == share[-1][0]
            self._run_micro_step(self.data_parallel.part_submitted if last else None)
            if size := self.objective.score_size:
                device.copy(self.objective.scores, device.view(self._told, (size,), ALIGN + number * size))
        self._sum_gradient()
        if targets:
            self._update(self.optimizer.step)
        at = self._recorded * self._history.shape[1]
        device.copy(self._loss, device.view(self._history, (1,), at))
        device.copy(self.optimizer.state, device.view(self._history, (STATE_SIZE,), at + ALIGN))
        if scores := self._history.shape[1] - 2 * ALIGN:
            kept = device.view(self._history, (scores,), at + 2 * ALIGN)
            device.copy(device.view(self._told, (scores,), ALIGN), kept)
        device.fill(self._told, 0.0)
        self._recorded += 1

    def metrics(self, row: np.ndarray) -> dict[str, float]:
        """Return the objective's metrics of a step, from its row of the history."""
        size = self.objective.score_size
        if not size:
            return {}
        return self.objective.metrics(self.objective.sums(row[1 + STATE_SIZE :].reshape(-1, size)))

    def _sum_gradient(self) -> None:
        try:
            self.data_parallel.sum_gradient(self._told)
        except RanksLost:
            self.device.fill(self.optimizer.parameters.grad, 0.0)
            self.device.fill(self._told, 0.0)
            raise

    def read_history(self) -> np.ndarray:
        """Wait for the device, and return float32 [steps since the last call, 1 + STATE_SIZE + scores]: loss, optimizer
        state, and scores for `metrics`."""
        return self.history_readback().result()

    def history_readback(self) -> HistoryReadback:
        """Start `read_history` without waiting: further steps may be recorded meanwhile."""
        count, self._recorded = self._recorded, 0
        return HistoryReadback(self.device.readback(self._history), count)

    def evaluate(self, batches: Sequence[Batch], progress: Callable[[int], None] | None = None) -> float:
        """Return the loss of `measure`."""
        return self.measure(batches, progress)[0]

    def measure(
        self, batches: Sequence[Batch], progress: Callable[[int], None] | None = None
    ) -> tuple[float, dict[str, float]]:
        """Return the mean loss over all targets (sft: in nats), without dropout, and the objective's metrics.

        The loss is NaN if there are no targets.

        Args:
            batches: Batches of all ranks.
            progress: Called with the number of finished batches of this rank, while the device works on the next.
        """
        targets = sum(b.num_targets for b in batches)
        if not targets:
            return float("nan"), {}
        self.objective.begin(batches)
        while True:
            mine = batches[self.world.rank :: self.world.size]
            loss, sums = self._measure(mine, progress)
            try:
                loss = self.world.total(loss, "the held-out loss")
                sums = np.array([self.world.total(value, "the held-out loss") for value in sums])
            except RanksLost:
                continue  # the remaining ranks share the batches again
            return loss / targets, self.objective.metrics(sums)

    def _measure(self, batches: Sequence[Batch], progress: Callable[[int], None] | None) -> tuple[float, np.ndarray]:
        """Return the sum of the loss over the batches' targets, and the objective's sums."""
        self.device.fill(self._eval_loss, 0.0)
        before: Readback | None = None
        scores: list[Readback] = []
        for number, batch in enumerate(batches):
            self._write(batch)
            self._add_eval_loss()
            if self.objective.score_size:
                scores.append(self.device.readback(self.objective.scores))
            if progress is not None:
                if before is not None:
                    before.result()
                    progress(number)
                before = self.device.readback(self._eval_loss)
        total = float(self.device.download(self._eval_loss)[0])
        found = [readback.result() for readback in scores]
        return total, self.objective.sums(np.stack(found) if found else np.zeros((0, self.objective.score_size)))

    def _add_eval_loss(self) -> None:
        """Add the loss of the batch that was written. Temporary arrays use memory that later steps need anyway."""
        with no_grad(), self.device.borrowing():
            self._evaluation(self._add_loss)

    def _add_loss(self) -> None:
        loss = self.objective.loss(self.eval_inputs)
        self.device.add(self._eval_loss, loss.data, out=self._eval_loss)


class HistoryReadback:
    """The history of `count` steps while it is copied to the host."""

    def __init__(self, rows: Readback, count: int) -> None:
        self._rows, self._count = rows, count

    def ready(self) -> bool:
        return self._rows.ready()

    def result(self) -> np.ndarray:
        rows = self._rows.result()[: self._count]
        return np.concatenate([rows[:, :1], rows[:, ALIGN : ALIGN + STATE_SIZE], rows[:, 2 * ALIGN :]], axis=1)
