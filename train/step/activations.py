"""Choose which activations a run keeps, recomputes or offloads, by its options, and estimate their bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.ops.loss import LOGIT_ELEMENTS
from wgrad.device.errors import WgradError
from wgrad.train.model.model import MLP_CHUNK_BYTES
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.weights import activation_bytes, attention_bytes
from wgrad.train.options.choices import AUTO
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.options.options import flag
from wgrad.train.step.memory import limit_bytes

# Bytes of saved activations above which layers are recomputed, if the device's memory is not known.
RECOMPUTE_ABOVE = 2 << 30
# Attention outputs are kept by default for sequences of at least KEEP_ATTENTION_FROM tokens, if they take less than
# KEEP_ATTENTION_BELOW bytes. Recomputing them there is a tenth of a step of the 1B model, and that share grows with the
# sequence (bench/notes/tensor-cores.md).
KEEP_ATTENTION_FROM, KEEP_ATTENTION_BELOW = 8192, 4 << 30
# The MLP of a long sequence works in chunks of 1 / MLP_CHUNK_SHARE of a memory limit, but of at least
# LEAST_MLP_CHUNK_BYTES: with those, the 8B model with streamed weights fits into 3 GiB.
MLP_CHUNK_SHARE, LEAST_MLP_CHUNK_BYTES = 32, 192 << 20


def estimate_activations(config: RunOptions, model: ModelConfig) -> int:
    """Estimate the bytes that a step in NumPy needs temporarily, for activations and the loss's logits."""
    tokens, layers, itemsize = config.rows * config.max_length, model.num_hidden_layers, itemsize_of(config)
    kept, logits = activation_bytes(model, tokens, itemsize), min(tokens * model.vocab_size, LOGIT_ELEMENTS) * 4
    recomputed = recomputed_layers(config, model)
    if not recomputed:
        return kept + logits
    # Every layer's input, plus either the logits or one recomputed layer with its largest gradients.
    layer = kept // layers + 2 * tokens * model.mlp_width * itemsize
    attention = attention_bytes(model, tokens, itemsize) * recomputed // layers if keeps_attention(config, model) else 0
    whole = kept // layers * (layers - recomputed)
    return recomputed * tokens * model.hidden_size * 4 + whole + attention + max(layer, logits)


def recomputed_layers(config: RunOptions, model: ModelConfig) -> int:
    """Return how many layers, from the first on, are recomputed in the backward. WgradError: the model has fewer.

    While --gradient-checkpointing is still auto, and in runs from before there was auto: all layers if their
    activations are estimated to exceed RECOMPUTE_ABOVE, else none.
    """
    asked, layers = config.gradient_checkpointing, model.num_hidden_layers
    if config.stream_weights == "on":
        return layers
    if not config.checkpointing_open:
        return _layers("gradient_checkpointing", asked, layers)
    estimate = activation_bytes(model, config.rows * config.max_length, itemsize_of(config))
    return layers if config.offload_activations or estimate > RECOMPUTE_ABOVE else 0


def recomputes_all(config: RunOptions, model: ModelConfig) -> bool:
    """Return whether all layers are recomputed."""
    return recomputed_layers(config, model) == model.num_hidden_layers


def offloaded_layers(config: RunOptions, model: ModelConfig) -> int:
    """Return how many layers, from the first on, have their inputs offloaded. WgradError: the model has fewer."""
    asked = _layers("offload_activations", config.offload_activations, model.num_hidden_layers)
    return min(asked, recomputed_layers(config, model))


def _layers(name: str, asked: Any, layers: int) -> int:
    """Return the number of layers that an option asks for: true (all), false, or a number."""
    if asked is True:
        return layers
    if asked > layers:
        raise WgradError(
            f"{flag(name)}: must be at most {layers}, the layers of the model; got {asked}: leave the number out for "
            "all of them"
        )
    return int(asked)


def keeps_attention(config: RunOptions, model: ModelConfig) -> bool:
    """Return whether recomputed layers keep their attention outputs: --keep-attention, else for long sequences if they
    are small enough and no option limits memory."""
    if not recomputed_layers(config, model):
        return False
    if config.keep_attention is not None:
        return config.keep_attention
    if config.limit or config.offload_activations or config.stream_weights == "on":
        return False
    held = attention_bytes(model, config.rows * config.max_length, itemsize_of(config))
    return config.max_length >= KEEP_ATTENTION_FROM and held < KEEP_ATTENTION_BELOW


def mlp_chunk_bytes(config: RunOptions) -> int | None:
    """Return the bytes that the MLP of long sequences may take at a time; None: the default of `Model`."""
    if config.mlp_chunk is not None:
        return limit_bytes(config.mlp_chunk)
    limit = limit_bytes(config.limit)
    return limit and min(MLP_CHUNK_BYTES, max(LEAST_MLP_CHUNK_BYTES, limit // MLP_CHUNK_SHARE))


def itemsize_of(config: RunOptions) -> int:
    """Return the bytes of an activation; while --compute is still auto, the most that it can be."""
    return np.dtype("float32" if config.compute == AUTO else config.compute).itemsize
