"""Experts in GGUF files: gate and up of all experts are tensors of their own there.

Source: github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py, src/llama-model.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from wgrad.train.files.gguf_fields import GgufFields
from wgrad.train.model.experts import GATE_UP
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.weights import WeightSpec, weight_specs

HALVES = ("gate_proj", "up_proj")
_NORMALIZED = {"llama": True, "qwen3moe": True, "olmoe": False}  # as llama.cpp has it for the architecture


def gguf_specs(config: ModelConfig) -> list[WeightSpec]:
    """The model's tensors as a GGUF file has them."""
    found = []
    for spec in weight_specs(config):
        found += halves_of(spec) if spec.kind == "experts" and spec.name.endswith(GATE_UP) else [spec]
    return found


def halves_of(spec: WeightSpec) -> list[WeightSpec]:
    """Gate and up of the weight that holds both."""
    experts, rows, columns = spec.shape
    owner = spec.name.removesuffix(GATE_UP)
    return [replace(spec, name=owner + half, shape=(experts, rows // 2, columns)) for half in HALVES]


def by_halves(config: ModelConfig, value: Callable[[WeightSpec], np.ndarray]) -> Callable[[WeightSpec], np.ndarray]:
    """`value` of the model's tensors -> of those of `gguf_specs`, asked for in their order."""
    whole = {half.name: spec for spec in weight_specs(config) if spec.kind == "experts" for half in halves_of(spec)}
    whole = {name: spec for name, spec in whole.items() if spec.name.endswith(GATE_UP)}
    held: dict[str, np.ndarray] = {}

    def of_half(spec: WeightSpec) -> np.ndarray:
        source = whole.get(spec.name)
        if source is None:
            return value(spec)
        if source.name not in held:
            held[source.name] = value(source)
        gate, up = np.split(held[source.name], 2, axis=1)
        if spec.name.endswith(HALVES[0]):
            return gate
        del held[source.name]
        return up

    return of_half


def tensor_name(names: Any, name: str) -> str:
    """GGUF's name of a tensor, "" where it has none. names: of gguf's `get_tensor_name_map`."""
    found = names.get_name(name, (".weight", ".bias"))
    if found and not found.endswith((".weight", ".bias")):  # of experts, which have no such ending here
        found += ".weight"
    return found or ""


def write_experts(writer: Any, config: ModelConfig, architecture: str) -> None:
    """Write the keys of the experts."""
    if config.experts is None:
        return
    writer.add_expert_count(config.experts.count)
    writer.add_expert_used_count(config.experts.chosen)
    if architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(config.experts.width)


def without_place(config: ModelConfig, architecture: str) -> Iterator[str]:
    """Refuse experts that a file has no key for."""
    if config.experts is None:
        return
    if config.experts.normalize != _NORMALIZED[architecture]:
        yield f"experts whose weights {'' if config.experts.normalize else 'do not '}add up to 1"
    if architecture == "olmoe" and config.num_key_value_heads != config.num_attention_heads:
        yield "fewer heads of keys than of queries"
    if not all(config.experts.layers):
        yield "layers without experts"


def keys_of_experts(fields: GgufFields, count: int) -> dict[str, Any]:
    """The keys of config.json. count: of experts."""
    if not count:
        return {}
    prefix = fields.architecture + "."
    found = {"num_experts": count, "num_local_experts": count, "norm_topk_prob": _NORMALIZED[fields.architecture]}
    found["num_experts_per_tok"] = fields.needed(prefix + "expert_used_count", int)
    width = fields.get(prefix + "expert_feed_forward_length", int)
    return found | ({} if width is None else {"moe_intermediate_size": width})
