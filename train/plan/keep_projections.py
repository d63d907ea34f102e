"""Choose which outputs of projections recomputed layers keep: offloaded, or on the device in place of whole layers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from wgrad.device.main_memory import free_memory
from wgrad.train.model.weights import layer_flops
from wgrad.train.options.finetune_config import MOST_KEPT
from wgrad.train.plan.memory_limit import may_have_larger_chunks
from wgrad.train.plan.plan import Plan
from wgrad.train.plan.rates import Rates
from wgrad.train.step.activations import gate_up_bytes, offloaded_bytes, recomputed_layers

# Offloaded activations of all ranks take at most half of free main memory, if it is wgrad that chooses what they are.
_HOST_SHARE = 2
_TRIED = 3  # numbers of layers that keep gate and up, from the one that free bytes suffice for down


def hidden_projections(fit: Any) -> int:
    """Return the most of --keep-projections whose copies to main memory overlap with matmuls, and that fit there; 0 if
    the options say how many.

    fit: a `Fit`.
    """
    config, model = fit.config, fit.model_config
    if config.keep_projections is not None or config.keep_attention is False:
        return 0
    hidden, free = fit.device.copied_alongside(layer_flops(model, config.rows * config.max_length)), free_memory()
    most = min(hidden, math.inf if free is None else free / _HOST_SHARE / fit.local_ranks / fit.layers)
    found, before = 0, 0.0
    for kept in range(1, MOST_KEPT + 1):
        each = offloaded_bytes(config, model, kept)
        if each > most:
            break
        if each > before:
            found, before = kept, each
    return found


def with_fewer_recomputed(fit: Any, plan: Plan) -> Plan:
    """Return a plan that recomputes one layer less and keeps no projections, if it fits and is faster."""
    config, recomputed = plan.config, recomputed_layers(plan.config, fit.model_config)
    if not config.keep_projections or fit.config.keep_projections is not None:
        return plan
    # In chunks as small as the limit asks for, if they are larger by now.
    small = replace(config, mlp_chunk=fit.config.mlp_chunk)
    config = small if may_have_larger_chunks(small) else config
    fewer = replace(fit.keeping(config, fit.layers - recomputed + 1), keep_projections=None)
    faster = fit.step_seconds(fewer, Rates()) < fit.step_seconds(config, Rates())
    return (fit.fitting(fewer) if faster else None) or plan


def with_gate_up(fit: Any, plan: Plan) -> Plan:
    """Return a plan that keeps gate and up of recomputed layers in place of whole layers, where that is faster.

    Whole layers take more memory for what they save, since much of the others is offloaded or takes no time.
    """
    config, recomputed = plan.config, recomputed_layers(plan.config, fit.model_config)
    chunk = gate_up_bytes(config, fit.model_config)
    if not config.keep_projections or not chunk or fit.config.keep_gate_up is not None or len(fit.peaks) < 2:
        return plan
    (few, lowest), (many, highest) = min(fit.peaks.items()), max(fit.peaks.items())
    each, free = (highest - lowest) / (many - few), fit.limit - plan.reserved_bytes
    kept, whole = fit.layers - recomputed, config
    if config.offload_activations == recomputed:
        whole = replace(config, offload_activations=True)

    def gates(fewer: int) -> int:
        return max(min(int((free + fewer * each) / chunk), recomputed + fewer), 0)

    def seconds(fewer: int) -> float:
        found: float = fit.step_seconds(replace(fit.keeping(whole, kept - fewer), keep_gate_up=gates(fewer)), Rates())
        return found

    # The last layer's activations take no memory: they are freed before others are recomputed.
    fewer = min(range(max(kept, 1)), key=seconds)
    least = fit.keeping(whole, kept - fewer)
    for number in range(gates(fewer), max(gates(fewer) - _TRIED, 0), -1):
        found = replace(least, keep_gate_up=number)
        if fit.step_seconds(found, Rates()) >= fit.step_seconds(config, Rates()):
            break
        made: Plan | None = fit.fitting(found)
        if made is not None:
            return made
    return plan
