"""Number of layers whose weights stay on the device while the weights of others are streamed."""

from __future__ import annotations

import math

from wgrad.device.errors import WgradError
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.weights import weight_specs
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.options import flag

_SPARE = 64  # the fraction 1 / _SPARE of a limit stays free


def plannable(limit: int) -> int:
    """Return the bytes that a plan may take of a limit.

    A part stays free, as the memory pool of a run has slightly other gaps than that of its plan (0.2 % seen).
    """
    return limit - limit // _SPARE


def resident_layers(config: RunOptions, model: ModelConfig) -> int:
    """Return how many layers keep their weights on the device while others are streamed. WgradError: too many."""
    asked, layers = config.resident_layers or 0, model.num_hidden_layers
    if asked > layers:
        raise WgradError(
            f"{flag('resident_layers')}: must be at most {layers}, the layers of the model; got {asked}: give a lower "
            "number, or leave it out"
        )
    return asked if config.stream_weights == "on" else 0


def keeps_head(resident: int, model: ModelConfig) -> bool:
    """Return whether the head stays on the device as well, where weights are streamed to decode: a token needs all of
    it, but few of a layer's experts."""
    return resident > 0 and model.experts is not None


def head_bytes(resident: int, model: ModelConfig) -> int:
    """Return the bytes of a head that stays."""
    return 2 * model.vocab_size * model.table_width if keeps_head(resident, model) else 0


def layer_bytes(host_bytes: float, model: ModelConfig) -> float:
    """Return the mean bytes of a layer's weights. host_bytes: bytes in main memory if all weights are streamed."""
    tables = [spec for spec in weight_specs(model) if spec.kind in ("embedding", "head")]
    return max(host_bytes - sum(2 * math.prod(spec.shape) for spec in tables), 1) / model.num_hidden_layers
