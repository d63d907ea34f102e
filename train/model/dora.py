"""DoRA's magnitudes: what they begin as, and the lengths that go with adapters which stay as they are.

Source: DoRA (arXiv 2402.09353), as PEFT has it.
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
    """One over the length of each row of a weight with its adapter, float32 [out]."""
    return inverse_row_norms(device, weight, module.a.data, module.b.data, module.scaling)


def start_magnitudes(adapter: Adapter, weights: Mapping[str, Any], device: Device) -> None:
    """Write the lengths that the weights' rows have with the adapter into its magnitudes."""
    for name, module in adapter.modules.items():
        if isinstance(weights, StreamedWeights):
            weights.enter(int(name.split(".")[2]))
        if module.magnitude is not None:
            inverse = device.download(inverse_of(module, weights[f"{name}.weight"], device))
            device.write(module.magnitude.data, (1 / inverse.astype(np.float64)).astype(np.float32))


def with_inverses(adapter: Adapter, weights: Mapping[str, Any], device: Device) -> Adapter:
    """An adapter that stays as it is, with its lengths worked out once (not where weights come and go)."""
    if not adapter.config.dora or isinstance(weights, StreamedWeights):
        return adapter
    found = {n: inverse_of(module, weights[f"{n}.weight"], device) for n, module in adapter.modules.items()}
    return replace(adapter, modules={n: replace(m, inverse=found[n]) for n, m in adapter.modules.items()})
