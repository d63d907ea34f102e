"""Quantization-aware training: weights are rounded as in the merged GGUF file, again after each step.

An adapted projection is the rounded sum of the base weight and its adapter, and gradients pass the rounding unchanged
(straight-through estimator). Weights without an adapter are rounded once.
Sources: arXiv 1712.05877, section 3; arXiv 1308.3432.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wgrad.device.contract import Array, Device
from wgrad.device.errors import WgradError
from wgrad.device.formats.frozen_weight import FrozenWeight, gguf_formats
from wgrad.device.formats.gguf_quantize import ROUNDED
from wgrad.train.model.gguf_model import GgufModel
from wgrad.train.model.lora import Adapter
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_files import open_files
from wgrad.train.model.weights import WeightSpec, weight_specs

QAT_MIXES = {"q4_0": "q4_0", "q4_k": "q4_k_m"}  # value of --qat: mix of `wgrad merge --quantize`


@dataclass(frozen=True)
class Rounding:
    """The format that each matrix of a model is rounded to. Matrices that stay 16-bit floats have no entry."""

    formats: Mapping[str, type[FrozenWeight]]

    @classmethod
    def of(cls, qat: str, folder: Any, config: ModelConfig) -> Rounding:
        """Return the formats of a model.

        Args:
            qat: Key of QAT_MIXES.
            folder: The base model's folder.

        Raises:
            WgradError: GGUF cannot hold the model, or --qat does not support one of its types.
        """
        if config.experts is not None:
            raise WgradError(f"--qat: {config.architecture} has experts, which it does not round: leave it out")
        model = GgufModel(config, open_files(folder, config)[0], QAT_MIXES[qat])
        model.check("--qat")
        found = {spec.name: model.stored(spec) for spec in weight_specs(config) if spec.kind in _MATRICES}
        kinds = {name: gguf_formats()[kind] for name, kind in found.items() if kind not in ("F16", "F32")}
        for name, kind in kinds.items():
            if kind.format not in ROUNDED:
                raise WgradError(
                    f"--qat: {qat} stores {name} as {kind.gguf_type}, which is not rounded in training: leave it out"
                )
        return cls(kinds)

    def fixed(
        self, weights: Mapping[str, Any], adapter: Adapter, config: ModelConfig, device: Device
    ) -> dict[str, Any]:
        """Return the weights with those rounded that have no adapter.

        Projections become quantized weights. Embedding and head keep their dtype.
        """
        weights = dict(weights)
        for spec in weight_specs(config):
            kind = self.formats.get(spec.name)
            if kind is None or spec.name.removesuffix(".weight") in adapter.modules:
                continue
            made = _empty(kind, spec, device)
            device.round_weight(_as_float32(weights[spec.name], device), made)
            if spec.kind == "projection":
                weights[spec.name] = made
            else:
                values = device.download(device.dequantize(made))
                device.write(weights[spec.name], values.astype(weights[spec.name].dtype))
        return weights

    def with_places(self, adapter: Adapter, config: ModelConfig, device: Device) -> Adapter:
        """Return the adapter with an empty rounded weight for each module, which `round_adapted` fills."""
        modules = dict(adapter.modules)
        for spec in weight_specs(config):
            name, kind = spec.name.removesuffix(".weight"), self.formats.get(spec.name)
            if kind is not None and name in modules:
                modules[name] = replace(modules[name], rounded=_empty(kind, spec, device))
        return replace(adapter, modules=modules)


_MATRICES = ("embedding", "head", "projection")


def round_adapted(adapter: Adapter, weights: Mapping[str, Any], device: Device) -> None:
    """Round the sum of each adapted weight and its adapter. This only launches device work, so it can be captured."""
    for name, module in adapter.modules.items():
        if module.rounded is not None:
            base = _as_float32(weights[f"{name}.weight"], device)
            device.round_weight(adapted(base, module.a.data, module.b.data, module.scaling, device), module.rounded)


def adapted(weight: Array, a: Array, b: Array, scaling: float, device: Device) -> Array:
    """Return W + scaling B A in float32, the sum that both training and merging round."""
    total: Array = device.gemm(b, a, alpha=scaling, residual=weight, dtype=np.float32)
    return total


def _as_float32(weight: Any, device: Device) -> Array:
    if isinstance(weight, FrozenWeight):
        return device.dequantize(weight)
    return weight if weight.dtype == np.float32 else device.cast(weight, np.float32)


def _empty(kind: type[FrozenWeight], spec: WeightSpec, device: Device) -> FrozenWeight:
    rows, columns = spec.shape
    weight: FrozenWeight = kind.empty((rows, columns), device.empty)  # type: ignore[attr-defined]
    return weight
