"""Random weights that are streamed from main memory, for the benches of steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.train.commands.bench_model import RandomWeights
from wgrad.train.model.host_layers import (
    HostLayer,
    Layer,
    ResidentLayer,
    SplitLayer,
    arrays_of,
    stays,
)
from wgrad.train.model.load_streamed import chosen_share
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.streamed_weights import StreamedWeights
from wgrad.train.model.weights import EMBEDDING, HEAD, weight_specs
from wgrad.wgsl.device import DryRunDevice


def streamed_weights(
    config: ModelConfig,
    device: Any,
    mxfp4_experts: bool = False,
    resident: int = 0,
    whole_layers: bool = False,
    keep_head: bool = False,
    slots: int = 0,
    skew: float = 0.0,
) -> StreamedWeights:
    """bench_train.py's weights, a layer at a time through the device into main memory. resident: layers that stay.
    whole_layers: experts that no token of a few chose are copied, too. keep_head: the head stays as well. slots: as in
    `load_streamed`. skew: routers prefer some experts: an expert's logits are times 1 + skew u^4, with u evenly random
    from 0 to 1."""
    source, dry = RandomWeights(device, mxfp4_experts), isinstance(device, DryRunDevice)
    specs = weight_specs(config)
    others = {s.name: source.make(s) for s in specs if s.kind in ("norm", "bias", "router")}
    rng = np.random.default_rng(0)
    for spec in specs:
        if spec.kind == "router" and not dry:
            table = 0.02 * rng.standard_normal(spec.shape) * (1 + skew * rng.random((spec.shape[0], 1)) ** 4)
            others[spec.name] = device.upload(table.astype(source.normal.dtype))
    experts = frozenset(spec.name for spec in specs if spec.kind == "experts")
    tables: dict[str, Any] = {}
    layers: list[Layer] = []
    before: tuple[list[Any], dict[str, Any]] = ([], {})
    head = EMBEDDING if config.tie_word_embeddings else HEAD
    for spec in specs:
        if keep_head and spec.name == head:
            others[spec.name] = device.upload(source.table(spec))
        elif spec.kind in ("embedding", "head"):
            tables[spec.name] = device.empty_host(spec.shape, source.normal.dtype)
            if not dry:
                device.write(tables[spec.name], source.table(spec))
    for number in range(config.num_hidden_layers):
        prefix = f"model.layers.{number}."
        own = [s for s in specs if s.is_linear and s.name.startswith(prefix)]
        kind = [(s.kind, s.shape) for s in own]
        if stays(number, config.num_hidden_layers, resident):
            made = {s.name: source.make(s) for s in own}
            layers.append(ResidentLayer(made, made))
            continue
        if kind != before[0]:  # layers of the same sizes have the same random numbers
            before = (kind, {s.name: source.make(s) for s in own})
        made = dict(zip((s.name for s in own), before[1].values(), strict=True))
        if slots:
            layers.append(split := SplitLayer.like(made, experts, device))
            split.resident.weights.update({s.name: source.make(s) for s in own if s.name not in experts})
            layer = split.host
        else:
            layers.append(layer := HostLayer.like(made, device))
        parts = {name: made[name] for name in layer.weights}
        for array, place in zip(arrays_of(parts), arrays_of(layer.weights), strict=True):
            device.transfer(array, place)
        device.synchronize()
    del made, before
    device.trim()
    share, count = 0.0 if whole_layers else chosen_share(config), config.experts.count if config.experts else 0
    return StreamedWeights(device, others, tables, layers, experts, share, slots, count)
