"""GGUF keys of families whose experts have their own keys, most of which choose experts by corrected scores.

Source: github.com/ggml-org/llama.cpp, its converter's Glm4MoeModel, Dots1Model, Ernie4_5MoeModel and
DeepseekV2Model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wgrad.train.files.gguf_fields import GgufFields
from wgrad.train.model.experts import Experts

_SOFTMAX, _SIGMOID = 1, 2  # values of llama.cpp's ExpertGatingFuncType


def write_scored(writer: Any, gguf: Any, experts: Experts, listed: bool = False, averages: bool = False) -> None:
    """Write the keys of a router with corrections, and which layers have experts.

    listed: another key lists them. averages: the output is the mean of experts' and shared experts', without a factor.
    """
    if not listed:
        writer.add_leading_dense_block_count(experts.layers.index(True))
    least = 1 if experts.shared_width else 0  # a shared expert may be narrower
    writer.add_expert_shared_count(max(least, experts.shared_width // experts.width))
    if experts.correction and not experts.sigmoid:
        writer.add_interleave_moe_layer_step(1)
        return
    gating = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(gating.SIGMOID if experts.sigmoid else gating.SOFTMAX)
    writer.add_expert_weights_scale(1.0 if averages else experts.share_scale)
    writer.add_expert_weights_norm(experts.normalize)
    if experts.groups > 1:
        writer.add_expert_group_count(experts.groups)
        writer.add_expert_group_used_count(experts.top_groups)


def without_scored_place(experts: Experts) -> Iterator[str]:
    """Yield an arrangement of layers with experts that GGUF has no key for."""
    first = experts.layers.index(True)
    if experts.layers != tuple(i >= first for i in range(len(experts.layers))):
        yield "layers without experts after layers with experts"


def keys_of_scored(fields: GgufFields, count: int, chosen: int) -> dict[str, Any]:
    """Return the config.json keys of the experts. count, chosen: number of experts in a layer, and for a token."""
    prefix = fields.architecture + "."
    if fields.get(prefix + "expert_gating_func", int, _SIGMOID) != _SIGMOID:
        raise fields.error(prefix + "expert_gating_func", f"must be {_SIGMOID}, sigmoid")
    names = fields.traits.renamed
    return {names.get(key, key): value for key, value in _keys(fields, count, chosen).items()}


def keys_of_softmax(fields: GgufFields, count: int, chosen: int) -> dict[str, Any]:
    """Do as `keys_of_scored` for Mistral Small 4, whose scores are a softmax."""
    if has_sigmoids(fields):
        raise fields.error(fields.architecture + ".expert_gating_func", f"must be {_SOFTMAX}, softmax")
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


def keys_by_shared_width(fields: GgufFields, count: int, chosen: int) -> dict[str, Any]:
    """Do as `keys_of_scored` for Hy3 and Laguna, whose files state the width of the shared experts."""
    prefix = fields.architecture + "."
    width = fields.needed(prefix + "expert_feed_forward_length", int)
    shared = fields.get(prefix + "expert_shared_feed_forward_length", int, width)
    names, counted = fields.traits.renamed, "n_shared_experts"
    found = keys_of_scored(fields, count, chosen) | {"shared_expert_intermediate_size": shared}
    del found["sliding_window"]
    if counted in names and (shared < 1 or shared % max(width, 1)):
        raise fields.error(prefix + "expert_shared_feed_forward_length", f"must be a multiple of {width}, got {shared}")
    return found | ({names[counted]: shared // max(width, 1)} if counted in names else {})


def keys_of_averaged(fields: GgufFields, count: int, chosen: int) -> dict[str, Any]:
    """Do as `keys_of_scored` for Cohere 2 with experts, whose scores are sigmoids or a softmax of the chosen."""
    prefix = fields.architecture + "."
    sigmoid = fields.get(prefix + "expert_gating_func", int, 0) in (0, _SIGMOID) or has_sigmoids(fields)
    found = {fields.traits.renamed.get(key, key): value for key, value in _keys(fields, count, chosen).items()}
    if (scale := found["routed_scaling_factor"]) != 1:
        raise fields.error(prefix + "expert_weights_scale", f"must be 1, got {scale:g}")
    if not sigmoid and not found["norm_topk_prob"]:
        raise fields.error(prefix + "expert_weights_norm", "must be true with a softmax, got false")
    kept = ("n_group", "topk_group", "routed_scaling_factor", "moe_intermediate_size", "sliding_window")
    found |= {"expert_selection_fn": "sigmoid" if sigmoid else "softmax"}
    return {key: value for key, value in found.items() if key not in kept}


def keys_of_nemotron(fields: GgufFields, count: int, chosen: int) -> dict[str, Any]:
    """Do as `keys_of_scored` for Nemotron 3, with the widths of its shared expert and of its experts' latents."""
    prefix = fields.architecture + "."
    shared = fields.needed(prefix + "expert_shared_feed_forward_length", int)
    latent = fields.get(prefix + "moe_latent_size", int)
    own = {"moe_shared_expert_intermediate_size": shared, "moe_latent_size": latent}
    return keys_of_scored(fields, count, chosen) | own


def keys_of_gemma4(fields: GgufFields, count: int, chosen: int) -> dict[str, Any]:
    """Do as `keys_of_scored` for Gemma 4."""
    width = fields.needed(f"{fields.architecture}.expert_feed_forward_length", int)
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": chosen,
        "moe_intermediate_size": width,
    }


def has_sigmoids(fields: GgufFields) -> bool:
    """Return whether a router's scores are sigmoids.

    Raises:
        WgradError: They are neither sigmoids nor a softmax.
    """
    key = fields.architecture + ".expert_gating_func"
    found = fields.get(key, int, 0) or _SOFTMAX  # older files of DeepSeek-V2 do not have the key
    if found not in (_SOFTMAX, _SIGMOID):
        raise fields.error(key, f"must be {_SOFTMAX}, softmax, or {_SIGMOID}, sigmoid, got {found}")
    return found == _SIGMOID


def keys_of_deepseek2(fields: GgufFields, count: int, chosen: int) -> dict[str, Any]:
    """Do as `keys_of_scored` for DeepSeek V2 and V3."""
    found = _keys(fields, count, chosen)
    if has_sigmoids(fields):
        return found
    return found | {"topk_method": "group_limited_greedy" if found["n_group"] > 1 else "greedy"}


def keys_of_ernie(fields: GgufFields, count: int, chosen: int) -> dict[str, Any]:
    """Do as `keys_of_scored` for ERNIE 4.5, counting shared experts by width: files may state another number."""
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
