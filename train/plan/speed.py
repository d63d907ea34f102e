"""Predict the seconds of a training step from the FLOP and bytes of its parts, and a few rates of the device."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wgrad.device.cache import cache_folder, keep, read_kept
from wgrad.device.contract import Device
from wgrad.device.errors import DeviceError
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.weights import activation_bytes, layer_flops, numbers_in_layers
from wgrad.train.options.finetune_config import RunOptions
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
from wgrad.train.step.dequantized import kept_share
from wgrad.train.step.resident import resident_layers

_FORMAT, _MOST_BYTES, _LEAST_SECONDS = 1, 1 << 12, 0.02
_MOST_RATE = 1e17  # a higher measured rate means that the clock was wrong
# Passes of a step over its activations in addition to matmuls, and over the decoded values of a frozen weight for each
# matmul: they are written once, and read from the L2 cache.
_ACTIVATION_PASSES, _DECODED_PASSES = 3, 1
_ALONGSIDE = 0.1  # share of a copy's time that it adds to the matmuls it overlaps with (bench/notes/checkpointing.md)


@dataclass(frozen=True)
class Rates:
    """Rates of a device: FLOP/s of matmuls and attention, bytes/s of device memory and of copies to main memory."""

    matmul: float = 290e12
    attention: float = 120e12
    memory: float = 2.5e12
    link: float = 45e9


def rates_of(device: Device, compute: str) -> Rates | None:
    """Return the rates of a GPU, measured once and cached; None for NumPy, software drivers, and planned GPUs."""
    if device.dry_run() is None or device.facts.get("type") in ("CPU", "elsewhere"):
        return None
    what = f"{device.description}; {compute}; {device.fastest_compute}; {_FORMAT}"
    file = _file(what)
    with suppress(OSError, ValueError, TypeError, RecursionError):
        kept = Rates(**json.loads(read_kept(file, _MOST_BYTES)))
        if all(isinstance(rate, float) and 0 < rate <= _MOST_RATE for rate in asdict(kept).values()):
            return kept
    try:
        found = _measured(device, np.dtype(compute))
    except DeviceError:
        return None
    with suppress(OSError):  # else it is measured again next time
        keep(file, json.dumps(asdict(found)).encode())
    return found


def _file(what: str) -> Path:
    """Return the file of the cache for the rates of a device and dtype."""
    return cache_folder("rates") / f"step-{hashlib.sha256(what.encode()).hexdigest()[:32]}.json"


def _measured(device: Any, dtype: np.dtype) -> Rates:
    a, b = device.zeros((4096, 4096), dtype), device.zeros((4096, 4096), dtype)
    matmul = 2.0 * 4096**3 / _seconds(device, lambda: device.gemm(a, b, trans_b=True, dtype=dtype))
    q, start, none = (
        device.zeros((1, 2048, 32, 64), dtype),
        device.zeros((1, 2048), np.int32),
        device.zeros((1,), np.int32),
    )
    seconds = _seconds(device, lambda: device.attention(q, q, q, start, none, scale=0.125))
    attention = _attention_flops(2048, 2048, 32 * 64) / seconds
    memory = 2.0 * a.nbytes / _seconds(device, lambda: device.copy(a, b))
    link = memory
    if not device.shared_memory and device.host_buffers:
        host = device.empty_host(a.shape, dtype)
        link = a.nbytes / _seconds(device, lambda: device.transfer(a, host))
    return Rates(matmul, attention, memory, link)


def _seconds(device: Device, work: Callable[[], Any]) -> float:
    """Return the seconds of a call, after a first one that compiles."""
    work()
    device.synchronize()
    count = 1
    while True:
        begun = time.perf_counter()
        for _ in range(count):
            work()
        device.synchronize()
        seconds = time.perf_counter() - begun
        if seconds >= _LEAST_SECONDS or count >= 1 << 12:
            return max(seconds, 1e-9) / count
        count *= 4


def _attention_flops(tokens: int, length: int, width: int) -> float:
    """Return the FLOP of a causal forward."""
    return 2.0 * tokens * length * width


def _mixing_flops(model: ModelConfig, tokens: int, length: int) -> float:
    """Return the FLOP of a forward of attention, or of its replacement in a layer, averaged over the layers."""
    widths = sum(map(model.q_size_of, range(model.num_hidden_layers)))
    attention = _attention_flops(tokens, length, widths) / model.num_hidden_layers
    if model.linear is None:
        return attention
    layers = range(model.num_hidden_layers)
    attend, linear = sum(map(model.attends, layers)) / len(layers), sum(model.linear.layers) / len(layers)
    return attend * attention + linear * model.linear.flops(tokens)


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
    head = 2.0 * tokens * model.hidden_size * model.vocab_size
    trained = 3 if config.full else 2
    again = recomputed * again - 2.0 * model.hidden_size * of_layers / itemsize
    seconds = (layers * trained * matmul + again + trained * head) / rates.matmul
    kept = recomputed * (not keeps_attention(config, model))
    seconds += (layers * 3.5 + kept) * attention / rates.attention
    activations = activation_bytes(model, tokens, itemsize)
    seconds += _ACTIVATION_PASSES * activations * (1 + recomputed / layers / 3) / rates.memory
    if not config.full:
        decoded = matmul / 2 / tokens * itemsize * (1 - kept_share(config, model, recomputed))
        seconds += (2 * layers + recomputed) * _DECODED_PASSES * decoded / rates.memory
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
