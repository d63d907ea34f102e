"""Objectives of a run, computed on the device: cross-entropy of tokens (sft), or preference losses.

An objective's loss is the sum over the units of a micro-batch (target tokens, pairs or examples), which the trainer
divides by the units of the whole step. The reference model of dpo and kto is the model with its adapter off.
Sources: DPO (arXiv 2305.18290), robust DPO (2403.00409), ORPO (2403.07691), KTO (2402.01306), SimPO (2405.14734),
as TRL computes them (tests/train/test_oracle_preferences.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.tensor import Tensor, no_grad
from wgrad.device.contract import Array, Device
from wgrad.train.data.packing import IGNORE_INDEX, Batch
from wgrad.train.model.model import Model
from wgrad.train.model.model_inputs import Inputs
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.objectives import SFT
from wgrad.train.step.optim import ALIGN


def write_batch(device: Device, inputs: Inputs, batch: Batch, targets: np.ndarray) -> None:
    """Write the rows of a micro-batch into the arrays that a model reads."""
    assert inputs.targets is not None
    device.write(inputs.ids, batch.ids.reshape(-1))
    device.write(inputs.targets, targets.reshape(-1))
    device.write(inputs.positions, batch.positions.reshape(-1))
    device.write(inputs.doc_start, batch.doc_start)
    if inputs.tables is not None:
        inputs.tables.write(device, batch.positions, batch.doc_start)


# tanh(_STEEP * x) is the sign of x, unless x is as small as rounding errors of log-probabilities.
_STEEP = 2.0**20


class Loss:
    """Cross-entropy of the targets (sft), and base class of other losses.

    Attributes:
        score_size: Floats of `scores`, which the device keeps of each micro-batch for metrics; 0: none.
    """

    score_size = 0

    def __init__(self, model: Model, config: RunOptions) -> None:
        self.model, self.config, self.device = model, config, model.device

    def begin(self, batches: Sequence[Batch]) -> None:
        """Prepare for the micro-batches of a step, or of an evaluation."""

    def targets(self, batch: Batch) -> np.ndarray:
        """Return int32 [B, T]: the targets that the model gets."""
        return batch.targets

    def write(self, batch: Batch) -> None:
        """Copy to the device what the loss of this micro-batch needs in addition to the model's inputs."""

    def loss(self, inputs: Inputs) -> Tensor:
        """Return the loss, float32 [1]. Only device work, the same at each call, so that it can be recorded."""
        return self.model.loss(inputs)

    @property
    def scores(self) -> Array:
        raise NotImplementedError

    def sums(self, scores: np.ndarray) -> np.ndarray:
        """Return float64 sums, to be added over ranks, of scores float32 [micro-batches, score_size]."""
        return np.zeros(0)

    def metrics(self, sums: np.ndarray) -> dict[str, float]:
        """Return the metrics of `sums` by TRL's names; NaN if nothing was measured."""
        return {}


class Preference(Loss):
    """Base class of losses of log-probabilities of completions, each a row of the micro-batch.

    Attributes:
        columns: Floats of each row in `scores`: its label, then the results of `_log_probs`.
    """

    columns = 1

    def __init__(self, model: Model, config: RunOptions) -> None:
        super().__init__(model, config)
        self.rows, device = config.rows, self.device
        self._width = -(-self.rows // ALIGN) * ALIGN  # views begin at multiples of it
        self.score_size = self.columns * self._width
        self._scores = device.zeros((self.score_size,))
        self._ones = device.upload(np.ones((config.max_length, 1), np.float32))

    @property
    def scores(self) -> Array:
        return self._scores

    def write(self, batch: Batch) -> None:
        assert batch.labels is not None
        self.device.write(self._column(0), batch.labels.reshape(-1, 1))

    def _column(self, number: int) -> Array:
        return self.device.view(self._scores, (self.rows, 1), number * self._width)

    def _log_probs(self, inputs: Inputs, column: int) -> Tensor:
        """Return [rows, 1]: the log-probability of each completion, also written to this column of the scores."""
        losses = self.model.token_losses(inputs).reshape(self.rows, -1)
        found = F.gemm(losses, self._ones, alpha=-1.0)
        self.device.copy(found.data, self._column(column))
        return found

    def _reference(self, inputs: Inputs, column: int) -> Array:
        """Return [rows, 1]: the negated log-probabilities of the model without its adapter."""
        with self.model.without_adapter(), no_grad():
            found = self._log_probs(replace(inputs, seed=None), column)
        return self.device.scale(found.data, -1.0)

    def _columns_of(self, scores: np.ndarray) -> np.ndarray:
        """Reshape scores, float32 [micro-batches, score_size], to float64 [columns, micro-batches, rows]."""
        parts = scores.reshape(-1, self.columns, self._width)[:, :, : self.rows]
        return np.moveaxis(parts.astype(np.float64), 1, 0)


class Pairs(Preference):
    """Base class of losses of pairs: rows of chosen completions, followed by as many rejected ones."""

    def __init__(self, model: Model, config: RunOptions) -> None:
        super().__init__(model, config)
        device, pairs = self.device, config.batch_size
        eye = np.eye(pairs, dtype=np.float32)
        self._difference = Tensor(device.upload(np.concatenate([eye, -eye], axis=1)), device)
        # Cross-entropy of the two logits z and 0: -log sigmoid(z) for the first, -log sigmoid(-z) for the second.
        self._logits = device.upload(np.array([[1.0], [0.0]], np.float32))
        self._first, self._second = (device.upload(np.zeros(pairs, np.int32)) for _ in range(2))

    def write(self, batch: Batch) -> None:
        super().write(batch)
        assert batch.labels is not None
        there = batch.labels[: self.config.batch_size] > 0
        for target, array in enumerate((self._first, self._second)):
            self.device.write(array, np.where(there, target, IGNORE_INDEX).astype(np.int32))

    def _prefer(self, values: Tensor, alpha: float, targets: Array, offset: Array | None = None) -> Tensor:
        """Return [1]: the sum over pairs of -log sigmoid(alpha * (chosen - rejected) + offset).

        values: [rows, 1], of chosen then rejected completions. offset: [pairs, 1].
        """
        z = F.gemm(self._difference, values, alpha=alpha)
        return F.linear_cross_entropy(z if offset is None else F.add(z, offset), self._logits, targets)

    def sums(self, scores: np.ndarray) -> np.ndarray:
        columns, pairs = self._columns_of(scores), self.config.batch_size
        there = columns[0][:, :pairs] > 0
        values = columns[1:3] if self.columns > 2 else np.stack([columns[1], np.zeros_like(columns[1])])
        chosen, rejected = (values[:, :, part][:, there] for part in (slice(pairs), slice(pairs, None)))
        rewards = [self.config.beta * (log_probs[0] - log_probs[1]) for log_probs in (chosen, rejected)]
        return np.array(
            [
                there.sum(),
                rewards[0].sum(),
                rewards[1].sum(),
                (rewards[0] > rewards[1]).sum(),
                chosen[0].sum(),
                rejected[0].sum(),
            ],
            np.float64,
        )

    def metrics(self, sums: np.ndarray) -> dict[str, float]:
        with np.errstate(invalid="ignore"):
            chosen, rejected, accurate, *log_probs = sums[1:] / sums[0]
        return {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": accurate,
            "rewards/margins": chosen - rejected,
            "logps/chosen": log_probs[0],
            "logps/rejected": log_probs[1],
        }


class DirectPreference(Pairs):
    """dpo; with label smoothing, robust DPO."""

    columns = 3

    def loss(self, inputs: Inputs) -> Tensor:
        reference = self._reference(inputs, 2)
        ratios = F.add(self._log_probs(inputs, 1), reference)
        beta, smoothing = self.config.beta, self.config.label_smoothing
        loss = self._prefer(ratios, beta, self._first)
        if not smoothing:
            return loss
        flipped = self._prefer(ratios, beta, self._second)
        rest = 1 - 2 * smoothing
        return F.add(F.scale(loss, (1 - smoothing) / rest), F.scale(flipped, -smoothing / rest))


class _ByMean(Pairs):
    """Base class of losses of the mean log-probability of an answer's tokens."""

    columns = 2

    def __init__(self, model: Model, config: RunOptions) -> None:
        super().__init__(model, config)
        self._of_answer = self.device.zeros((self.rows, config.max_length))  # weights of tokens

    def write(self, batch: Batch) -> None:
        super().write(batch)
        answers = batch.targets != IGNORE_INDEX
        lengths = np.maximum(answers.sum(axis=1, keepdims=True), 1)
        self.device.write(self._of_answer, (answers / lengths).astype(np.float32))

    def _mean(self, losses: Tensor) -> Tensor:
        """Return the mean log-probability [rows, 1], also written to the scores. losses: [rows, seq_len]."""
        mean = F.gemm(F.mul(losses, self._of_answer), self._ones, alpha=-1.0)
        self.device.copy(mean.data, self._column(1))
        return mean


class SimplePreference(_ByMean):
    """simpo: the reward is beta times the mean; that of chosen should exceed that of rejected by a margin."""

    def __init__(self, model: Model, config: RunOptions) -> None:
        super().__init__(model, config)
        self._margin = self.device.upload(np.full((config.batch_size, 1), -config.simpo_gamma, np.float32))

    def loss(self, inputs: Inputs) -> Tensor:
        mean = self._mean(self.model.token_losses(inputs).reshape(self.rows, -1))
        return self._prefer(mean, self.config.beta, self._first, self._margin)


class OddsRatio(_ByMean):
    """orpo: cross-entropy of the chosen text, prompt included, plus the odds ratio of mean log-probabilities."""

    def __init__(self, model: Model, config: RunOptions) -> None:
        super().__init__(model, config)
        self._of_chosen = self.device.zeros((self.rows, config.max_length))  # weights of tokens
        self._each = 0.0  # weight of a token of a chosen text

    def begin(self, batches: Sequence[Batch]) -> None:
        """Weigh the tokens of chosen texts to be averaged, though the loss is divided by the number of pairs."""
        tokens = sum(int((_all_targets(b)[: self.config.batch_size] != IGNORE_INDEX).sum()) for b in batches)
        self._each = sum(batch.num_targets for batch in batches) / max(tokens, 1)

    def write(self, batch: Batch) -> None:
        super().write(batch)
        chosen = _all_targets(batch) != IGNORE_INDEX
        chosen[self.config.batch_size :] = False
        self.device.write(self._of_chosen, (self._each * chosen).astype(np.float32))

    def targets(self, batch: Batch) -> np.ndarray:
        """Return all tokens as targets, prompts included: `_of_answer` and `_of_chosen` weigh them."""
        return _all_targets(batch)

    def loss(self, inputs: Inputs) -> Tensor:
        losses = self.model.token_losses(inputs).reshape(self.rows, -1)
        preferred = self._prefer(F.log_odds(self._mean(losses)), 1.0, self._first)
        return F.add(F.sum(F.mul(losses, self._of_chosen)), F.scale(preferred, self.config.beta))


def _all_targets(batch: Batch) -> np.ndarray:
    """Return int32 [B, T]: the next token of the document for each token, whether it is learned or not."""
    found = np.full(batch.ids.shape, IGNORE_INDEX, np.int32)
    follows = batch.positions[:, 1:] == batch.positions[:, :-1] + 1
    found[:, :-1] = np.where(follows, batch.ids[:, 1:], IGNORE_INDEX)
    return found


class Kto(Preference):
    """kto: labeled examples, compared with the micro-batch's KL divergence, estimated on its mismatched rows."""

    columns = 5

    def __init__(self, model: Model, config: RunOptions) -> None:
        super().__init__(model, config)
        device = self.device
        self._mismatched = Inputs.empty(model, self.rows, config.max_length)
        self._mean = device.zeros((1, self.rows))  # weights of the mean over rows
        self._weights = device.zeros((self.rows, 2))  # weights of softmax([z, 0])
        self._z_and_0 = device.upload(np.array([[1.0, 0.0]], np.float32))
        self._rows_of_1 = device.upload(np.ones((self.rows, 1), np.float32))

    def write(self, batch: Batch) -> None:
        super().write(batch)
        assert batch.labels is not None and batch.mismatched is not None
        write_batch(self.device, self._mismatched, batch.mismatched, batch.mismatched.targets)
        labels, config = batch.labels, self.config
        self.device.write(self._mean, np.float32(labels != 0).reshape(1, -1) / np.float32(batch.num_targets))
        weights = np.where(labels > 0, config.desirable_weight, config.undesirable_weight) * (labels != 0)
        self.device.write(self._weights, np.stack([np.zeros(self.rows), weights], axis=1).astype(np.float32))

    def loss(self, inputs: Inputs) -> Tensor:
        device = self.device
        reference, divergence = self._reference(inputs, 2), self._divergence()
        offset = device.add(reference, device.gemm(self._rows_of_1, divergence, alpha=-1.0))
        z = F.mul(F.add(self._log_probs(inputs, 1), offset), self._column(0))
        # The second value is 1 - sigmoid(beta z).
        both = F.softmax(F.gemm(z, self._z_and_0, alpha=self.config.beta))
        return F.sum(F.mul(both, self._weights))

    def _divergence(self) -> Array:
        """Return [1, 1]: the mean log-ratio to the reference over the mismatched rows, or 0 if that is negative."""
        device = self.device
        with no_grad():
            policy = self._log_probs(self._mismatched, 3).data
        ratios = device.add(policy, self._reference(self._mismatched, 4))
        mean = device.gemm(self._mean, ratios)
        sign = device.softcap(device.scale(mean, _STEEP), 1.0)
        return device.scale(device.add(mean, device.mul(mean, sign)), 0.5)

    def sums(self, scores: np.ndarray) -> np.ndarray:
        labels, policy, reference, other, other_reference = self._columns_of(scores)
        parts = [labels > 0, labels < 0]
        rewards = self.config.beta * (policy - reference)
        kept = [values[part].sum() for values in (np.ones_like(labels), rewards, policy) for part in parts]
        rows = (labels != 0).sum(axis=1)
        means = ((other - other_reference) * (labels != 0)).sum(axis=1)[rows > 0] / rows[rows > 0]
        return np.array([*kept, np.maximum(means, 0).sum(), len(means)], np.float64)

    def metrics(self, sums: np.ndarray) -> dict[str, float]:
        with np.errstate(invalid="ignore"):
            (chosen, rejected), log_probs = sums[2:4] / sums[:2], sums[4:6] / sums[:2]
            divergence = sums[6] / sums[7]
        return {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "logps/chosen": log_probs[0],
            "logps/rejected": log_probs[1],
            "kl": divergence,
        }


# Keys: names of train/options/objectives.py.
LOSSES: dict[str, type[Loss]] = {
    SFT: Loss,
    "dpo": DirectPreference,
    "orpo": OddsRatio,
    "kto": Kto,
    "simpo": SimplePreference,
}


def make_loss(model: Model, config: RunOptions) -> Loss:
    """Return the loss of --objective."""
    return LOSSES[config.objective](model, config)
