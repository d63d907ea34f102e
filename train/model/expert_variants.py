"""Fields of `ModelConfig` of the families with a mixture of experts, from the keys of their config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from wgrad.train.model.config_file import layer_windows
from wgrad.train.model.expert_keys import (
    FlexOlmoFile,
    GptOssFile,
    GraniteMoeFile,
    GraniteMoeSharedFile,
    GraniteMoeSwaFile,
    HunYuanMoeFile,
    MellumFile,
    MiniMaxM2File,
    MixtralFile,
    OlmoeFile,
    PhimoeFile,
    Qwen2MoeFile,
    Qwen3MoeFile,
)
from wgrad.train.model.experts import Experts
from wgrad.train.model.variants import biases, every_layer, granite_factors, granite_windows, hunyuan, olmo2


def _in_every_layer(keys: Any, **options: Any) -> Experts:
    """Return experts of every layer, as wide as the MLP in the keys."""
    layers = (True,) * keys.num_hidden_layers
    return Experts(keys.experts, keys.num_experts_per_tok, keys.intermediate_size, layers, **options)


def _in_sparse_layers(keys: Any, **options: Any) -> Experts | None:
    """Return the experts of the layers that have some; None if no layer has."""
    layers, chosen = keys.sparse_layers(), keys.num_experts_per_tok
    experts = Experts(keys.experts, chosen, keys.moe_intermediate_size, layers, keys.norm_topk_prob, **options)
    return experts if any(layers) else None


def mixtral(keys: MixtralFile) -> dict[str, Any]:
    """Mixtral (arXiv 2401.04088)."""
    return {"windows": every_layer(keys), "experts": _in_every_layer(keys, files="mixtral")}


def minimax_m2(keys: MiniMaxM2File) -> dict[str, Any]:
    """MiniMax-M2: DeepSeek-V3's scores without groups."""
    experts = _in_every_layer(keys, files="minimax", sigmoid=True, correction="mlp.e_score_correction_bias")
    return {"qk_norm": True, "qk_norm_whole": True, "experts": experts}


def olmoe(keys: OlmoeFile) -> dict[str, Any]:
    """OLMoE (arXiv 2409.02060)."""
    experts = _in_every_layer(keys, normalize=keys.norm_topk_prob)
    norms = {"qk_norm": True, "qk_norm_whole": True}
    return {**biases(keys), **norms, "clip_qkv": keys.clip_qkv or 0.0, "experts": experts}


def flex_olmo(keys: FlexOlmoFile) -> dict[str, Any]:
    """FlexOlmo (arXiv 2507.07024): OLMo 2 with OLMoE's experts."""
    experts = _in_every_layer(keys, normalize=keys.norm_topk_prob)
    return {**olmo2(keys), "experts": experts}


def hunyuan_moe(keys: HunYuanMoeFile) -> dict[str, Any]:
    """Hunyuan-A13B: the dense model's attention, and experts besides an MLP that every token uses."""
    experts = _in_every_layer(
        keys,
        router="mlp.gate.wg",
        files="hunyuan",
        shared_width=keys.intermediate_size,
        shared="mlp.shared_mlp",
        shared_gate="",
    )
    return {**hunyuan(keys), "experts": experts}


def qwen3_moe(keys: Qwen3MoeFile) -> dict[str, Any]:
    """Qwen3 with experts (arXiv 2505.09388)."""
    windows = every_layer(keys) if keys.use_sliding_window else (0,) * keys.num_hidden_layers
    return {**biases(keys), "qk_norm": True, "windows": windows, "experts": _in_sparse_layers(keys)}


def qwen_experts(keys: Any) -> Experts | None:
    """Return experts with a shared expert; None if no layer has experts."""
    return _in_sparse_layers(keys, shared_width=keys.shared_expert_intermediate_size)


def qwen2_moe(keys: Qwen2MoeFile) -> dict[str, Any]:
    """Qwen1.5-MoE and Qwen2-57B-A14B (arXiv 2407.10671)."""
    return {"qkv_bias": keys.qkv_bias, "windows": keys.windows(), "experts": qwen_experts(keys)}


def gpt_oss(keys: GptOssFile) -> dict[str, Any]:
    """gpt-oss (arXiv 2508.10925)."""
    experts = _in_every_layer(
        keys,
        router="mlp.router",
        files="gpt_oss",
        biased=True,
        interleaved=True,
        alpha=keys.swiglu_alpha,
        limit=keys.swiglu_limit,
    )
    return {**biases(keys), "windows": keys.windows, "sinks": True, "experts": experts}


def granite_moe(keys: GraniteMoeFile) -> dict[str, Any]:
    """Granite 3 with experts; some have a shared one."""
    shared = keys.shared_intermediate_size if isinstance(keys, GraniteMoeSharedFile) else 0
    experts = _in_every_layer(
        keys,
        module="block_sparse_moe.experts",
        router="block_sparse_moe.router",
        files="granite",
        shared_width=shared,
        shared="shared_mlp",
        shared_gate="",
        shared_fused=True,
    )
    return {**granite_factors(keys), "experts": experts}


def granite_moe_swa(keys: GraniteMoeSwaFile) -> dict[str, Any]:
    """Granite with experts, sliding windows and sinks."""
    found = granite_moe(keys)
    return {**found, **granite_windows(keys), "experts": replace(found["experts"], files="granite_swa")}


def mellum(keys: MellumFile) -> dict[str, Any]:
    """Mellum 2: Qwen3 with experts; layers with windows have their own rotary embeddings."""
    windows = layer_windows(keys.layer_types, keys.sliding_window, (False,) * keys.num_hidden_layers)
    return {**biases(keys), "qk_norm": True, "windows": windows, "experts": _in_sparse_layers(keys)}


def phimoe(keys: PhimoeFile) -> dict[str, Any]:
    """Phi-3.5-MoE (arXiv 2404.14219); SparseMixer's router (arXiv 2409.12136) chooses the best, without noise."""
    experts = _in_every_layer(
        keys,
        router="mlp.router",
        files="mixtral",
        mixer=2 * keys.router_jitter_noise,
    )
    return {
        **biases(keys),
        "layer_norm": True,
        "head_bias": keys.lm_head_bias,
        "windows": every_layer(keys),
        "experts": experts,
    }
