"""Custom losses and metrics of a Python caller: their arguments, and how a run calls them.

The device records the work of a loss once and replays it for each micro-batch. So a loss may only do device work, and
must do the same at each call.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgrad.autograd import functional as F
from wgrad.autograd.modes import is_recording, without_reading
from wgrad.autograd.tensor import Tensor, no_grad
from wgrad.device.contract import Array, Device
from wgrad.device.errors import WgradError
from wgrad.train.data.packing import IGNORE_INDEX, Batch
from wgrad.train.model.model import Model
from wgrad.train.model.model_inputs import Inputs
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.objectives import SFT
from wgrad.train.step.objectives import Loss

_ROWS = 256  # rows of logits that a metric gets at once: [256, V] float32 on the host


@dataclass(frozen=True)
class TokenBatch:
    """Micro-batch of a custom loss, as arrays on the device.

    Attributes:
        ids: int32 [B * T], the tokens.
        targets: int32 [B * T], the token that each one is to predict; -100: not trained.
        positions: int32 [B * T], counted from the start of each document.
        rows: B, the sequences.
        tokens: T, the tokens of a sequence.
        device: Device of the run, to make constants on.
    """

    ids: Array
    targets: Array
    positions: Array
    rows: int
    tokens: int
    device: Device


class ModelOutput:
    """The model's output for a micro-batch, with gradients.

    Attributes:
        hidden: [B * T, C], the final norm's output, in the compute dtype.
    """

    def __init__(self, model: Model, inputs: Inputs) -> None:
        self._model, self._targets = model, inputs.targets
        self.hidden: Tensor = model.hidden(inputs)

    def logits(self) -> Tensor:
        """Return float32 [B * T, V]. Raises WgradError for a model with soft-capped logits, such as Gemma 2."""
        if self._model.config.logit_softcap:
            raise WgradError("loss: logits of this model are soft-capped, which has no gradient: use token_losses()")
        return F.linear(self.hidden, self._model.head, bias=self._model._head_bias, dtype=np.float32)

    def token_losses(self) -> Tensor:
        """Return float32 [B * T]: the cross-entropy of each target in nats, 0 where there is no target.

        Raises:
            WgradError: The output layer is trained: this function has no gradient for it.
        """
        model = self._model
        if isinstance(model.head, Tensor) and model.head.requires_grad:
            raise WgradError("loss: token_losses() has no gradient of the output layer, which is trained: use logits()")
        options: dict[str, Any] = {"softcap": model.config.logit_softcap, "per_target": True}
        return F.linear_cross_entropy(self.hidden, model.head, self._targets, bias=model._head_bias, **options)


LossFunction = Callable[[ModelOutput, TokenBatch], Tensor]
Metric = Callable[[np.ndarray, np.ndarray], Any]


class CallersLoss(Loss):
    """Objective whose loss is a function of the caller."""

    def __init__(self, model: Model, config: RunOptions, function: LossFunction) -> None:
        super().__init__(model, config)
        self._function = function

    def loss(self, inputs: Inputs) -> Tensor:
        assert inputs.targets is not None
        batch = TokenBatch(inputs.ids, inputs.targets, inputs.positions, inputs.batch, inputs.tokens, self.model.device)
        output = ModelOutput(self.model, inputs)
        with without_reading("loss"):
            found = self._function(output, batch)
        if not isinstance(found, Tensor):
            raise WgradError(f"loss: must return a Tensor of one number; got {type(found).__name__}: return that")
        if math.prod(found.shape) != 1 or found.dtype != np.float32:
            raise WgradError(
                f"loss: must return one float32 number, the sum over the targets; got {found.dtype} "
                f"{list(found.shape)}: end with functional.sum"
            )
        if is_recording() and not found.requires_grad:
            raise WgradError("loss: depends on nothing that is trained: compute it from `output`, without detach")
        return found.reshape(1)


@dataclass(frozen=True)
class Hooks:
    """Custom loss and metrics of a Python caller. Raises WgradError if one cannot be called."""

    loss: LossFunction | None = None
    metrics: Mapping[str, Metric] | None = None

    def __post_init__(self) -> None:
        if self.loss is not None:
            _check_function(self.loss, "loss", "the model's output and the batch")
        if not isinstance(self.metrics or {}, Mapping):
            raise WgradError(f"metrics: must be a dict of names and functions; got {type(self.metrics).__name__}")
        for name, function in (self.metrics or {}).items():
            if not isinstance(name, str) or not name.isidentifier() or name == "loss":
                raise WgradError(f"metrics: a name must be a word other than 'loss'; got {name!r}: rename it")
            _check_function(function, f"metrics: {name}", "logits and targets")

    def __bool__(self) -> bool:
        return self.loss is not None or bool(self.metrics)

    def check(self, config: RunOptions) -> None:
        """Raise WgradError if the objective is not sft, or metrics have nothing to measure."""
        if self and config.objective != SFT:
            what = "loss" if self.loss is not None else "metrics"
            raise WgradError(f"{what}: is for objective='sft'; got {config.objective!r}: give only one of the two")
        if self.metrics and not config.eval_fraction and not config.eval_data:
            raise WgradError("metrics: are of held-out data, and there is none: give eval_fraction or eval_data")


def _check_function(function: Any, what: str, arguments: str) -> None:
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise WgradError(f"{what}: must be a plain function; got {function!r}: give one")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        raise WgradError(f"{what}: must take two arguments, {arguments}: change it") from None
    except ValueError:  # a function in C without a signature
        pass


def measure_metrics(
    metrics: Mapping[str, Metric], model: Model, write: Callable[[Batch], Inputs], batches: Sequence[Batch]
) -> dict[str, float]:
    """Return the mean of each metric over the target tokens of the batches; NaN where there are none.

    Args:
        metrics: Functions of (logits, targets), by name.
        model: Computes the logits.
        write: Copies a batch to the device.
        batches: Held-out data.

    Raises:
        WgradError: A metric returns neither one number nor one for each target.
    """
    sums, count, device = dict.fromkeys(metrics, 0.0), 0, model.device
    for batch in batches:
        targets = batch.targets.reshape(-1)
        with no_grad(), device.borrowing():
            hidden = model.hidden(write(batch)).data
            for start in range(0, len(targets), _ROWS):
                here = targets[start : start + _ROWS]
                rows = here != IGNORE_INDEX
                if not rows.any():
                    continue
                part = device.view(hidden, (len(here), hidden.shape[1]), start * hidden.shape[1])
                logits = device.download(model.logits(part))[rows]
                count += len(logits)
                for name, function in metrics.items():
                    sums[name] += _total(name, function(logits, here[rows]), len(logits))
    return {name: value / count if count else math.nan for name, value in sums.items()}


def _total(name: str, value: Any, count: int) -> float:
    """Return the sum over the targets of what a metric returned for them."""
    found = np.asarray(value)
    if found.dtype.kind not in "biuf" or found.size not in (1, count):
        raise WgradError(f"metrics: {name} must return a number or {count}, one for each target; got {value!r:.80}")
    return float(found.astype(np.float64).mean()) * count
