"""Predict the seconds of a training step from the FLOP and bytes of its parts, and the rates of the device."""

from __future__ import annotations

from functools import lru_cache

from wgrad.device.contract import Device
from wgrad.train.model.lora import linear_modules, match_targets
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.stacks import parts_of, stack_of
from wgrad.train.model.weights import activation_bytes, layer_flops, numbers_in_layers
from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.plan.rates import ATTENTION_FLOPS, Rates, attention_flops
from wgrad.train.step.activations import (
    gate_up_bytes,
    itemsize_of,
    keeps_attention,
    kept_gate_up,
    kept_projections,
    offloaded_bytes,
    offloaded_layers,
    projection_bytes,
    recomputed_layers,
)
from wgrad.train.step.dequantized import kept_count, kept_share
from wgrad.train.step.lora_options import lora_config
from wgrad.train.step.resident import resident_layers

# Passes of a step over its activations in addition to matmuls, and over the decoded values of a frozen weight for each
# matmul: they are written once, and read from the L2 cache.
_ACTIVATION_PASSES, _DECODED_PASSES = 3, 1
_FORWARD = 0.3  # share of a projection's launches that a recomputation repeats (bench/count_launches.py)
_NARROW = 64  # widest heads of `Rates.narrow`
_ALONGSIDE = 0.1  # share of a copy's time that it adds to the matmuls it overlaps with (bench/notes/checkpointing.md)


def _mixing_flops(model: ModelConfig, tokens: int, length: int) -> float:
    """Return the FLOP of a forward of attention, or of its replacement in a layer, averaged over the layers."""
    widths = sum(map(model.q_size_of, range(model.num_hidden_layers)))
    attention = attention_flops(tokens, length, widths) / model.num_hidden_layers
    if model.linear is None:
        return attention
    layers = range(model.num_hidden_layers)
    attend, linear = sum(map(model.attends, layers)) / len(layers), sum(model.linear.layers) / len(layers)
    return attend * attention + linear * model.linear.flops(tokens)


@lru_cache(maxsize=16)
def _widths(model: ModelConfig, targets: tuple[str, ...] | str, stacked: bool) -> tuple[int, int]:
    """Return the sums of the widths that LoRA's matmuls read: of inputs and of outputs of all adapted projections.

    stacked: The projections of a stack read their input once.
    """
    shapes = linear_modules(model)
    adapted = match_targets(targets, list(shapes))
    inputs = _apart(adapted) if stacked else adapted
    return sum(shapes[module][1] for module in inputs), sum(shapes[module][0] for module in adapted)


@lru_cache(maxsize=16)
def _projections(model: ModelConfig, stacked: bool) -> int:
    """Return the number of projections in all layers. stacked: Those of a stack count once."""
    modules = list(linear_modules(model))
    return len(_apart(modules) if stacked else modules)


def _apart(modules: list[str]) -> list[str]:
    """Return the modules, of each stack only the last one."""
    stacks = [stack for module in modules if (stack := stack_of(module)) is not None]
    before = {part for stack in stacks for part in parts_of(stack)[:-1]}
    return [module for module in modules if module not in before]


def _adapter_bytes(config: RunOptions, model: ModelConfig, device: Device, recomputed: int) -> float:
    """Return the bytes of the inputs and gradients that LoRA's matmuls read: x twice, dy once, and x again where a
    recomputed layer does not keep x A^T."""
    inputs, outputs = _widths(model, lora_config(config, model).target_modules, device.stacks_weights)
    again = 0 if keeps_attention(config, model) else recomputed / model.num_hidden_layers
    return config.rows * config.max_length * ((2 + again) * inputs + outputs) * itemsize_of(config)


def step_seconds(config: RunOptions, model: ModelConfig, device: Device, rates: Rates) -> float:
    """Predict the seconds of a step, with all its micro-batches, of a run whose choices are settled."""
    tokens, layers = config.rows * config.max_length, model.num_hidden_layers
    recomputed = recomputed_layers(config, model)
    itemsize = itemsize_of(config)
    matmul, attention = layer_flops(model, tokens), _mixing_flops(model, tokens, config.max_length)
    again = matmul - 2.0 * tokens * model.hidden_size * model.mlp_width  # all but the layer's last projection
    projections = kept_projections(config, model)
    of_layers = recomputed * sum(projection_bytes(config, model, projections))
    of_layers += kept_gate_up(config, model) * gate_up_bytes(config, model)
    head = 2.0 * tokens * model.table_width * model.vocab_size
    trained = 3 if config.full else 2
    again = recomputed * again - 2.0 * model.hidden_size * of_layers / itemsize
    seconds = (layers * trained * matmul + again) / (rates.matmul if config.quantize else rates.dense)
    seconds += trained * head / (rates.matmul if kept_count(config, 1) else rates.dense)
    kept = recomputed * (not keeps_attention(config, model))
    narrow = model.head_dim <= _NARROW
    seconds += (layers * ATTENTION_FLOPS + kept) * attention / (rates.narrow if narrow else rates.attention)
    passed = _ACTIVATION_PASSES * activation_bytes(model, tokens, itemsize) * (1 + recomputed / layers / 3)
    if config.keep_gated:  # else the backward writes it
        passed -= (layers - recomputed) * tokens * model.mlp_width * itemsize
    seconds += passed / rates.memory
    if not config.full:
        decoded = matmul / 2 / tokens * itemsize * (1 - kept_share(config, model, recomputed))
        seconds += (2 * layers + recomputed) * _DECODED_PASSES * decoded / rates.memory
        seconds += _adapter_bytes(config, model, device, recomputed) / rates.adapter
    seconds += _projections(model, device.stacks_weights) * (1 + _FORWARD * recomputed / layers) / rates.projections
    offloaded = offloaded_bytes(config, model, projections) if projections else tokens * model.hidden_size * 4.0
    hidden = min(offloaded, device.copied_alongside(matmul))
    seconds += 2 * offloaded_layers(config, model) * (offloaded - hidden + _ALONGSIDE * hidden) / rates.link
    if config.stream_weights == "on" and not device.shared_memory:
        each = numbers_in_layers(model) / layers * (0.55 if config.quantize else itemsize)
        streamed = layers - resident_layers(config, model)
        # The forward copies all streamed layers; the backward all but two that are still there, during twice the work.
        for count, work in ((streamed, layers * matmul), (streamed - 2, 2 * layers * matmul)):
            seconds += max(count * each - device.copied_alongside(work), 0.0) / rates.link
    return seconds * config.gradient_accumulation_steps
