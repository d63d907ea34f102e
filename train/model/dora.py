"""DoRA's magnitudes: their start values, and the precomputed row lengths of frozen adapters.

Source: DoRA (arXiv 2402.09353), as in PEFT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from wgrad.autograd.ops.dora import inverse_row_norms
from wgrad.device.contract import Array, Device
from wgrad.train.model.lora import Adapter, LoraModule
from wgrad.train.model.streamed_weights import StreamedWeights


def inverse_of(module: LoraModule, weight: Any, device: Device) -> Array:
    """Return 1 / length of each row of a weight with its adapter, float32 [out]."""
    return inverse_row_norms(device, weight, module.a.data, module.b.data, module.scaling)


def start_magnitudes(adapter: Adapter, weights: Mapping[str, Any], device: Device) -> None:
    """Set the adapter's magnitudes to the lengths of the weights' rows with the adapter."""
    for name, module in adapter.modules.items():
        if isinstance(weights, StreamedWeights):
            weights.enter(int(name.split(".")[2]))
        if module.magnitude is not None:
            inverse = device.download(inverse_of(module, weights[f"{name}.weight"], device))
            device.write(module.magnitude.data, (1 / inverse.astype(np.float64)).astype(np.float32))


def with_inverses(adapter: Adapter, weights: Mapping[str, Any], device: Device) -> Adapter:
    """Return a frozen adapter with its row lengths precomputed, unless weights are streamed."""
    if not adapter.config.dora or isinstance(weights, StreamedWeights):
        return adapter
    found = {n: inverse_of(module, weights[f"{n}.weight"], device) for n, module in adapter.modules.items()}
    return replace(adapter, modules={n: replace(m, inverse=found[n]) for n, m in adapter.modules.items()})
