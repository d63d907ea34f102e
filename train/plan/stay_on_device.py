"""Streamed weights: how many layers' weights stay on the device, and how many layers' inputs are offloaded.

The search starts where dry runs of a few layers point (`fewer_layers.py`), so that few dry runs of all layers are made.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from wgrad.train.options.finetune_config import RunOptions
from wgrad.train.plan.memory_limit import fewest_offloaded, in_large_chunks, may_have_larger_chunks
from wgrad.train.plan.plan import Plan, fill_with_layers
from wgrad.train.plan.rates import Rates, rates_of
from wgrad.train.step.resident import layer_bytes, plannable


def begin_streamed(fit: Any, mode: dict[str, Any], batches: list[int]) -> Plan | None:
    """Return the plan from which the search starts: with streamed weights, and as many layers on the device as seem to
    fit by dry runs of fewer layers. None: start with no layer on the device."""
    config = fit.of_batch(batches[0], mode)
    forecast = None
    if mode["stream_weights"] == "on" and len(batches) == 1 and not may_have_larger_chunks(config):
        left_open = not fit.device.shared_memory and fit.config.resident_layers is None
        forecast = fit.forecast if left_open else None
    if forecast is None or (peak := forecast.peak(config)) == math.inf:
        return None
    each = layer_bytes(forecast.host_weights(config), fit.model_config)
    if _stay_in_turn(fit, config, each)[0] != "resident_layers":
        return None
    guess = min(int((plannable(fit.limit) - peak) / each), fit.layers)
    plans = (fit.fitting(replace(config, resident_layers=n)) for n in (guess, guess - 1) if n > 0)
    return next((found for found in plans if found is not None), None)


def least_copied(fit: Any, found: Plan, offloads: bool) -> Plan:
    """Return a plan in which the weights of as many layers stay on the device, and the inputs of as few are offloaded,
    as fit. found: a plan with streamed weights. offloads: whether the number of offloaded inputs is open."""
    room, host = plannable(fit.limit), float(found.host_weight_bytes)
    none = replace(found.config, resident_layers=fit.config.resident_layers)
    if none != found.config and fit.forecast is not None:  # `begin_streamed`
        host = fit.forecast.host_weights(none)
    else:
        found = in_large_chunks(found, found.config, fit.fitting)
        none = found.config
    each = layer_bytes(host, fit.model_config)
    for name in _stay_in_turn(fit, none, each):
        if name == "offload_activations" and offloads:
            inputs = int((room - found.peak_bytes) / _input_bytes(fit, none))
            found = fewest_offloaded(found, fit.layers, fit.fitting, inputs)
        elif name == "resident_layers" and fit.config.resident_layers is None:
            found = fill_with_layers(found, each, fit.layers, room, fit.fitting)
    return found


def _stay_in_turn(fit: Any, config: RunOptions, each: float) -> list[str]:
    """Return the options for keeping weights and inputs on the device, first the one that saves more seconds per byte.

    each: bytes of a layer's weights.
    """
    rates = rates_of(fit.device, config.compute) or Rates()
    fewer: dict[str, Any] = {"resident_layers": 1, "offload_activations": max(fit.layers - 1, 0)}
    sizes = {"resident_layers": each, "offload_activations": _input_bytes(fit, config)}
    seconds = fit.step_seconds(config, rates)
    saved = {
        name: (seconds - fit.step_seconds(replace(config, **{name: value}), rates)) / sizes[name]
        for name, value in fewer.items()
    }
    return sorted(saved, key=lambda name: -saved[name])


def _input_bytes(fit: Any, config: RunOptions) -> float:
    """Return the bytes of a layer's input."""
    width: int = fit.model_config.hidden_size
    return 4.0 * config.rows * config.max_length * width
