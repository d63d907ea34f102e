"""Keys of GGUF files of models whose experts have keys of their own: those whose router chooses by corrected scores.

Source: github.com/ggml-org/llama.cpp, its converter's Glm4MoeModel, Dots1Model, Ernie4_5MoeModel and
DeepseekV2Model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wgrad.train.files.gguf_fields import GgufFields
from wgrad.train.model.experts import Experts

_SOFTMAX, _SIGMOID = 1, 2  # of llama.cpp's ExpertGatingFuncType


def write_scored(writer: Any, gguf: Any, experts: Experts, listed: bool = False) -> None:
    """Write what a router with corrections has, and which layers have experts, if these are not listed elsewhere."""
    if not listed:
        writer.add_leading_dense_block_count(experts.layers.index(True))
    writer.add_expert_shared_count(experts.shared_width // experts.width)
    if experts.correction and not experts.sigmoid:
        writer.add_interleave_moe_layer_step(1)
        return
    gating = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(gating.SIGMOID if experts.sigmoid else gating.SOFTMAX)
    writer.add_expert_weights_scale(experts.share_scale)
    writer.add_expert_weights_norm(experts.normalize)
    if experts.groups > 1:
        writer.add_expert_group_count(experts.groups)
        writer.add_expert_group_used_count(experts.top_groups)


def without_scored_place(experts: Experts) -> Iterator[str]:
    """Refuse layers with experts that a file has no key for."""
    first = experts.layers.index(True)
    if experts.layers != tuple(i >= first for i in range(len(experts.layers))):
        yield "layers without experts behind those with"


def keys_of_scored(fields: GgufFields, count: int, chosen: int) -> dict[str, Any]:
    """The keys of config.json. count, chosen: experts of a layer, and of a token."""
    prefix = fields.architecture + "."
    if fields.get(prefix + "expert_gating_func", int, _SIGMOID) != _SIGMOID:
        raise fields.error(prefix + "expert_gating_func", f"must be {_SIGMOID}, sigmoid")
    return _keys(fields, count, chosen)


def _keys(fields: GgufFields, count: int, chosen: int) -> dict[str, Any]:
    prefix = fields.architecture + "."
    first = fields.get(prefix + "leading_dense_block_count", int, 0)
    shared = fields.get(prefix + "expert_shared_count", int, 0)
    width = fields.needed(prefix + "expert_feed_forward_length", int)
    return {
        "n_routed_experts": count,
        "n_shared_experts": shared,
        "n_group": fields.get(prefix + "expert_group_count", int, 1) or 1,
        "topk_group": fields.get(prefix + "expert_group_used_count", int, 1) or 1,
        "first_k_dense_replace": first,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        "norm_topk_prob": fields.get(prefix + "expert_weights_norm", bool, False),
        "routed_scaling_factor": fields.get(prefix + "expert_weights_scale", float, 1.0) or 1.0,
        "sliding_window": None,
    }


def keys_of_nemotron(fields: GgufFields, count: int, chosen: int) -> dict[str, Any]:
    """As `keys_of_scored`, of Nemotron 3, whose shared expert has a width of its own."""
    shared = fields.needed(f"{fields.architecture}.expert_shared_feed_forward_length", int)
    return keys_of_scored(fields, count, chosen) | {"moe_shared_expert_intermediate_size": shared}


# What config.json of families calls the keys of `keys_of_scored`.
RENAMED = {
    "afmoe": {
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "first_k_dense_replace": "num_dense_layers",
        "routed_scaling_factor": "route_scale",
        "norm_topk_prob": "route_norm",
    },
    "exaone-moe": {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
    "lfm2moe": {"n_routed_experts": "num_experts", "first_k_dense_replace": "num_dense_layers"},
    "minimax-m2": {"n_routed_experts": "num_experts", "moe_intermediate_size": "intermediate_size"},
}


def keys_of_renamed(fields: GgufFields, count: int, chosen: int) -> dict[str, Any]:
    """As `keys_of_scored`, of families that have other names of the keys."""
    names = RENAMED[fields.architecture]
    return {names.get(key, key): value for key, value in keys_of_scored(fields, count, chosen).items()}


def keys_of_gemma4(fields: GgufFields, count: int, chosen: int) -> dict[str, Any]:
    """As `keys_of_scored`, of Gemma 4."""
    width = fields.needed(f"{fields.architecture}.expert_feed_forward_length", int)
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": chosen,
        "moe_intermediate_size": width,
    }


def has_sigmoids(fields: GgufFields) -> bool:
    """Return whether a router's scores are sigmoids. WgradError: neither those nor a softmax."""
    key = fields.architecture + ".expert_gating_func"
    found = fields.get(key, int, 0) or _SOFTMAX  # as llama.cpp takes older files of DeepSeek-V2
    if found not in (_SOFTMAX, _SIGMOID):
        raise fields.error(key, f"must be {_SOFTMAX}, softmax, or {_SIGMOID}, sigmoid, got {found}")
    return found == _SIGMOID


def keys_of_deepseek2(fields: GgufFields, count: int, chosen: int) -> dict[str, Any]:
    """As `keys_of_scored`, of DeepSeek V2 and V3."""
    found = _keys(fields, count, chosen)
    if has_sigmoids(fields):
        return found
    return found | {"topk_method": "group_limited_greedy" if found["n_group"] > 1 else "greedy"}


def keys_of_ernie(fields: GgufFields, count: int, chosen: int) -> dict[str, Any]:
    """As `keys_of_scored`, of ERNIE 4.5, whose shared experts' width counts: files may have another number of them."""
    prefix = fields.architecture + "."
    width = fields.needed(prefix + "expert_feed_forward_length", int)
    shared = fields.get(prefix + "expert_shared_feed_forward_length", int, 0)
    if fields.get(prefix + "interleave_moe_layer_step", int, 1) != 1 or shared % max(width, 1):
        key = "interleave_moe_layer_step" if not shared % max(width, 1) else "expert_shared_feed_forward_length"
        raise fields.error(prefix + key, f"must be {'1' if key[0] == 'i' else f'a multiple of {width}'}")
    return {
        "moe_num_experts": count,
        "moe_k": chosen,
        "moe_num_shared_experts": shared // max(width, 1),
        "moe_layer_start_index": fields.get(prefix + "leading_dense_block_count", int, 0),
        "moe_intermediate_size": width,
    }
