"""Fields of `ModelConfig` of the families with gated DeltaNet, from the keys of their config.json."""

from __future__ import annotations

from typing import Any

from wgrad.train.model.delta_net_keys import OlmoHybridFile, Qwen3NextFile, Qwen35File, Qwen35MoeFile, linear_layers
from wgrad.train.model.expert_variants import qwen_experts
from wgrad.train.model.linear_attention import LinearAttention
from wgrad.train.model.variants import biases, normed_outputs


def delta_net(keys: Any, **how: Any) -> LinearAttention | None:
    """Return the sizes of gated DeltaNet; None if no layer has it. how: arguments of `LinearAttention`."""
    layers = linear_layers(keys)
    if not any(layers):
        return None
    return LinearAttention(
        layers=layers,
        heads=keys.linear_num_value_heads,
        key_heads=keys.linear_num_key_heads,
        key_dim=keys.linear_key_head_dim,
        value_dim=keys.linear_value_head_dim,
        width=keys.linear_conv_kernel_dim,
        **how,
    )


def _attention(keys: Qwen35File | Qwen3NextFile) -> dict[str, Any]:
    """Return the options of attention, which every few layers have, with an output gate."""
    return {**biases(keys), "norm_offset": 1.0, "qk_norm": True, "attention_gate": True}


def qwen3_5(keys: Qwen35File) -> dict[str, Any]:
    """Qwen3.5: gated DeltaNet (arXiv 2412.06464) and, every few layers, attention with a gate."""
    return {**_attention(keys), "linear": delta_net(keys)}


def qwen3_next(keys: Qwen3NextFile) -> dict[str, Any]:
    """Qwen3-Next: Qwen3.5's layers with experts, and projections whose rows are grouped by key heads."""
    return {**_attention(keys), "linear": delta_net(keys, projected="by_head"), "experts": qwen_experts(keys)}


def qwen3_5_moe(keys: Qwen35MoeFile) -> dict[str, Any]:
    width = keys.moe_intermediate_size
    return {**_attention(keys), "linear": delta_net(keys), "experts": qwen_experts(keys), "intermediate_size": width}


def olmo_hybrid(keys: OlmoHybridFile) -> dict[str, Any]:
    """OLMo Hybrid: layers of OLMo 2, and layers of gated DeltaNet, whose norms are in other places."""
    linear = delta_net(
        keys,
        projected="apart",
        beta_scale=2.0 if keys.linear_allow_neg_eigval else 1.0,
        norm="linear_attn.o_norm",
        norm_eps=1e-5,
        norms=("input_layernorm", "", "post_attention_layernorm", ""),
        out_proj="linear_attn.o_proj",
        files="convolutions apart",
    )
    return {
        **biases(keys),
        **normed_outputs(),
        "qk_norm": True,
        "qk_norm_whole": True,
        "linear": linear,
        "use_rope": (keys.rotates,) * keys.num_hidden_layers,
    }
