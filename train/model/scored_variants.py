"""Conversion from config.json's keys to `ModelConfig` fields, for families whose router corrects its scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from wgrad.train.model.experts import Experts
from wgrad.train.model.scored_keys import (
    Dots1File,
    Ernie45MoeFile,
    ExaoneMoeFile,
    Glm4MoeFile,
    ScoredFile,
    SolarOpenFile,
)
from wgrad.train.model.variants import biases, exaone_attention

_SHARED: dict[str, Any] = {"shared": "mlp.shared_experts", "shared_gate": ""}


def scored_experts(keys: ScoredFile) -> Experts | None:
    """Return experts as in DeepSeek-V3 (arXiv 2412.19437), or None if no layer has experts."""
    layers = keys.sparse_layers()
    if not any(layers):
        return None
    return Experts(
        keys.experts,
        keys.num_experts_per_tok,
        keys.moe_intermediate_size,
        layers,
        bool(keys.norm_topk_prob),
        shared_width=keys.moe_intermediate_size * (keys.n_shared_experts or 0),
        sigmoid=True,
        correction="mlp.gate.e_score_correction_bias",
        groups=keys.n_group or 1,
        top_groups=keys.topk_group or 1,
        share_scale=keys.routed_scaling_factor,
        **_SHARED,
    )


def glm4_moe(keys: Glm4MoeFile) -> dict[str, Any]:
    """Return the `ModelConfig` fields of GLM-4.5 and 4.6 (arXiv 2508.06471)."""
    extra = {} if keys.num_mtp_layers is None else {"extra_layers": keys.num_mtp_layers}
    return {"qkv_bias": keys.attention_bias, "qk_norm": keys.use_qk_norm, "experts": scored_experts(keys), **extra}


def solar_open(keys: SolarOpenFile) -> dict[str, Any]:
    """Return the `ModelConfig` fields of Solar Open, a Llama with GLM-4.5's experts in every layer."""
    width = {"intermediate_size": keys.moe_intermediate_size}
    return {"qkv_bias": keys.attention_bias, "experts": scored_experts(keys), **width}


def dots1(keys: Dots1File) -> dict[str, Any]:
    """Return the `ModelConfig` fields of dots.llm1 (arXiv 2506.05767)."""
    return {**biases(keys), "qk_norm": True, "windows": keys.windows(), "experts": scored_experts(keys)}


def exaone_moe(keys: ExaoneMoeFile) -> dict[str, Any]:
    """Return the `ModelConfig` fields of K-EXAONE (arXiv 2601.01739)."""
    experts = scored_experts(keys)
    return {**exaone_attention(keys), "experts": replace(experts, files="exaone") if experts else None}


def ernie4_5_moe(keys: Ernie45MoeFile) -> dict[str, Any]:
    """Return the `ModelConfig` fields of ERNIE 4.5 with experts, which a softmax with a correcting bias chooses."""
    layers, biased = keys.sparse_layers(), bool(keys.use_bias)
    assert keys.num_experts_per_tok is not None, "set with the other name of the key"
    experts = Experts(
        keys.experts,
        keys.num_experts_per_tok,
        keys.moe_intermediate_size,
        layers,
        shared_width=keys.moe_intermediate_size * (keys.moe_num_shared_experts or 0),
        files="ernie",
        correction="mlp.gate.moe_statics.e_score_correction_bias",
        correction_rows=True,
        **_SHARED,
    )
    flags = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "head_bias"), biased)
    return {"interleaved": True, **flags, "experts": experts if any(layers) else None}
