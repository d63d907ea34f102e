"""Choose which activations a run keeps, recomputes or offloads, by its options, and estimate their bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.chunks import chunk_rows
from wgrad.autograd.ops.loss import LOGIT_ELEMENTS
from wgrad.device.contract import SCRATCH_BYTES
from wgrad.device.errors import WgradError
from wgrad.train.model.model import MLP_CHUNK_BYTES, MLP_CHUNKS_ABOVE
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.projections import Kept, kept_chunks, projection_widths
from wgrad.train.model.weights import activation_bytes, attention_bytes, mlp_row_bytes
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
SCRATCH_SHARE = 16  # operators may take 1 / SCRATCH_SHARE of a memory limit where that only saves time


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
    """Return whether recomputed layers keep their attention outputs: --keep-attention, or options that keep
    more, else for long sequences if they are small enough and no option limits memory."""
    if not recomputed_layers(config, model):
        return False
    if config.keep_attention is not None:
        return config.keep_attention
    if config.keep_projections or config.keep_gate_up:
        return True
    if config.limit or config.offload_activations or config.stream_weights == "on":
        return False
    held = attention_bytes(model, config.rows * config.max_length, itemsize_of(config))
    return config.max_length >= KEEP_ATTENTION_FROM and held < KEEP_ATTENTION_BELOW


def kept_projections(config: RunOptions, model: ModelConfig) -> int:
    """Return --keep-projections as far as it has an effect: in recomputed layers that keep their attention outputs."""
    return (config.keep_projections or 0) if keeps_attention(config, model) else 0


def kept_gate_up(config: RunOptions, model: ModelConfig) -> int:
    """Return how many recomputed layers keep gate and up of a chunk on the device."""
    most = recomputed_layers(config, model) if keeps_attention(config, model) else 0
    return min(config.keep_gate_up or 0, most)


def mlp_chunk_rows(config: RunOptions, model: ModelConfig) -> int:
    """Return the rows of a chunk of the MLP of recomputed layers: of the largest, unless an option says how large."""
    tokens = config.rows * config.max_length
    most, above = limit_bytes(config.mlp_chunk) or MLP_CHUNK_BYTES, MLP_CHUNKS_ABOVE if config.mlp_chunk is None else 0
    return chunk_rows(tokens, mlp_row_bytes(model, itemsize_of(config)), most, above) or tokens


def projection_bytes(config: RunOptions, model: ModelConfig, kept: int) -> tuple[float, float]:
    """Return the bytes of queries, keys and values, and of gate and up, that a recomputed layer keeps on average.

    kept: --keep-projections.
    """
    tokens, (mixer, mlp) = config.rows * config.max_length, projection_widths(model)
    rows = sum(_gate_up_rows(config, model, kept)) / 2
    return tokens * mixer * itemsize_of(config) * (kept > 0), rows * mlp * itemsize_of(config)


def gate_up_bytes(config: RunOptions, model: ModelConfig) -> float:
    """Return the bytes that a layer of --keep-gate-up keeps on the device, on average."""
    tokens, rows = config.rows * config.max_length, mlp_chunk_rows(config, model)
    before = _gate_up_rows(config, model, kept_projections(config, model))
    more = sum(min(rows, tokens - offloaded) for offloaded in before) / 2
    return more * projection_widths(model)[1] * itemsize_of(config)


def _gate_up_rows(config: RunOptions, model: ModelConfig, kept: int) -> list[int]:
    """Return of how many rows layers with an even and with an odd index keep gate and up. kept: --keep-projections."""
    tokens, rows = config.rows * config.max_length, mlp_chunk_rows(config, model)
    return [min(kept_chunks(kept, layer) * rows, tokens) for layer in range(2)]


def offloaded_bytes(config: RunOptions, model: ModelConfig, kept: int) -> float:
    """Return the bytes of a layer's input, attention output and kept projections. kept: --keep-projections."""
    tokens, itemsize = config.rows * config.max_length, itemsize_of(config)
    attention = attention_bytes(model, tokens, itemsize) / model.num_hidden_layers
    return tokens * model.hidden_size * 4 + attention + sum(projection_bytes(config, model, kept))


def mlp_chunk_bytes(config: RunOptions) -> int | None:
    """Return the bytes that the MLP of long sequences may take at a time; None: the default of `Model`."""
    if config.mlp_chunk is not None:
        return limit_bytes(config.mlp_chunk)
    limit = limit_bytes(config.limit)
    return limit and min(MLP_CHUNK_BYTES, max(LEAST_MLP_CHUNK_BYTES, limit // MLP_CHUNK_SHARE))


def scratch_bytes(config: RunOptions) -> int:
    """Return the bytes that an operator may take where that only saves time."""
    limit = limit_bytes(config.limit)
    return min(SCRATCH_BYTES, limit // SCRATCH_SHARE) if limit else SCRATCH_BYTES


def activation_options(config: RunOptions, model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of `Model` that say which activations it keeps, recomputes or offloads."""
    return {
        "recompute": recomputed_layers(config, model),
        "offload": offloaded_layers(config, model),
        "keep_attention": keeps_attention(config, model),
        "kept": Kept(kept_projections(config, model), kept_gate_up(config, model), bool(config.keep_gated)),
        "keep_norms": config.keep_norms is not False,
        "mlp_chunk_bytes": mlp_chunk_bytes(config),
        "mlp_chunks_above": None if config.mlp_chunk is None else 0,
    }


def itemsize_of(config: RunOptions) -> int:
    """Return the bytes of an activation; while --compute is still auto, the most that it can be."""
    return np.dtype("float32" if config.compute == AUTO else config.compute).itemsize
