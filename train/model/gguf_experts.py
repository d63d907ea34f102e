"""Experts in GGUF files: gate and up of all experts are tensors of their own there.

Source: github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py, src/llama-model.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from wgrad.train.files.gguf_fields import GgufFields
from wgrad.train.model.expert_files import parted
from wgrad.train.model.experts import DOWN, GATE_UP
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.weights import WeightSpec, weight_specs

HALVES = ("gate_proj", "up_proj")
# As llama.cpp has it for the architecture.
_NORMALIZED = {"llama": True, "qwen3moe": True, "olmoe": False, "gpt-oss": True}
_SWIGLU = {"gpt-oss": (1.702, 7.0)}  # alpha and limit


def gguf_specs(config: ModelConfig) -> list[WeightSpec]:
    """The model's tensors as a GGUF file has them."""
    return [part for spec in weight_specs(config) for part in parts_of(spec)]


def parts_of(spec: WeightSpec) -> list[WeightSpec]:
    """The tensors of a GGUF file that a weight consists of: gate and up of the weight, or bias, that holds both."""
    name, _, biased = spec.name.partition("_bias")
    ending = ".bias" if name != spec.name else ""
    if not name.endswith((GATE_UP, DOWN)) or len(spec.shape) < 2 or spec.kind == "projection":
        return [spec]
    if name.endswith(DOWN):
        return [replace(spec, name=name + ending)]
    experts, rows, *columns = spec.shape
    owner = name.removesuffix(GATE_UP)
    return [replace(spec, name=owner + half + ending, shape=(experts, rows // 2, *columns)) for half in HALVES]


def by_halves(config: ModelConfig, value: Callable[[WeightSpec], np.ndarray]) -> Callable[[WeightSpec], np.ndarray]:
    """`value` of the model's tensors -> of those of `gguf_specs`, asked for in their order."""
    whole = {part.name: spec for spec in weight_specs(config) for part in parts_of(spec)}
    held: dict[str, np.ndarray] = {}

    def of_part(part: WeightSpec) -> np.ndarray:
        source = whole[part.name]
        if source.shape == part.shape:
            return value(source)
        if source.name not in held:
            held[source.name] = value(source)
        assert config.experts is not None
        first = HALVES[0] in part.name
        half = parted(held[source.name], config.experts.interleaved)[not first]
        if not first:
            del held[source.name]
        return np.ascontiguousarray(half)

    return of_part


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
    if architecture in ("qwen3moe", "gpt-oss"):
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
    if config.experts.biased and not (config.qkv_bias and config.o_bias):
        yield "biases of experts and none of attention"
    swiglu = (config.experts.alpha, config.experts.limit)
    if swiglu != _SWIGLU.get(architecture, (0.0, 0.0)):
        yield f"experts with swiglu_alpha {swiglu[0]:g} and swiglu_limit {swiglu[1]:g}"


def keys_of_experts(fields: GgufFields, count: int) -> dict[str, Any]:
    """The keys of config.json. count: of experts."""
    if not count:
        return {}
    prefix = fields.architecture + "."
    found = {"num_experts": count, "num_local_experts": count, "norm_topk_prob": _NORMALIZED[fields.architecture]}
    found["num_experts_per_tok"] = fields.needed(prefix + "expert_used_count", int)
    width = fields.get(prefix + "expert_feed_forward_length", int)
    return found | ({} if width is None else {"moe_intermediate_size": width})
