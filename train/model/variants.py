"""Conversion from config.json's keys to `ModelConfig` fields, for families without experts or linear attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wgrad.train.model.family_keys import (
    Exaone4File,
    Gemma2File,
    Gemma3File,
    GemmaFile,
    GraniteFile,
    GraniteSwaFile,
    GraniteWindows,
    HyperClovaXFile,
    MistralFile,
    Phi3File,
    Qwen2File,
    SlidingGemmaFile,
    SmolLM3File,
)
from wgrad.train.model.layer_norm_keys import (
    ApertusFile,
    ArceeFile,
    Cohere2File,
    CohereFile,
    Jais2File,
    NanoChatFile,
    NemotronFile,
    OlmoFile,
    PhiFile,
    StableLmFile,
    Starcoder2File,
)
from wgrad.train.model.near_llama_keys import (
    CwmFile,
    Ernie45File,
    Glm4File,
    GlmFile,
    Ministral3File,
    SeedOssFile,
    query_growth,
)


def layer_names(layers: int, names: Mapping[str, str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return `ModelConfig.file_names` for names that differ in files of all layers.

    names: How they begin, behind `model.layers.N.`, and how those in files do.
    """
    prefixes = [f"model.layers.{i}." for i in range(layers)]
    return tuple((prefix + own, (prefix + other,)) for prefix in prefixes for own, other in names.items())


def biases(keys: Any) -> dict[str, Any]:
    """Return the fields for `attention_bias`, which concerns all four projections of attention."""
    return {"qkv_bias": keys.attention_bias, "o_bias": keys.attention_bias}


def llama(keys: Any) -> dict[str, Any]:
    return {**biases(keys), "mlp_bias": keys.mlp_bias}


def every_layer(keys: Any) -> tuple[int, ...]:
    """Return windows with `sliding_window` in all layers, or 0 if it is null."""
    result: tuple[int, ...] = (keys.sliding_window or 0,) * keys.num_hidden_layers
    return result


def mistral(keys: MistralFile) -> dict[str, Any]:
    return {"windows": keys.windows([True] * keys.num_hidden_layers)}


def upper_windows(keys: Qwen2File) -> tuple[int, ...]:
    """Return windows for layers from max_window_layers on, unless `layer_types` lists them."""
    return keys.windows(i >= keys.max_window_layers for i in range(keys.num_hidden_layers))


def smollm3(keys: SmolLM3File) -> dict[str, Any]:
    """SmolLM3: every fourth layer has no rotary embeddings. `no_rope_layers` is 1 for layers that have them."""
    if keys.no_rope_layers is not None:
        rotates = tuple(bool(layer) for layer in keys.no_rope_layers)
    else:
        rotates = tuple((i + 1) % keys.no_rope_layer_interval != 0 for i in range(keys.num_hidden_layers))
    # Without `layer_types`, layers without rotary embeddings have the windows, if there are any.
    windows = keys.windows(keys.use_sliding_window and not layer for layer in rotates)
    return {**biases(keys), "mlp_bias": keys.mlp_bias, "use_rope": rotates, "windows": windows}


def one_full_of(keys: Any, pattern: int) -> tuple[int, ...]:
    """Return windows for layers except every `pattern`-th, unless `layer_types` lists them."""
    result: tuple[int, ...] = keys.windows((i + 1) % pattern != 0 for i in range(keys.num_hidden_layers))
    return result


def gemma(keys: GemmaFile | SlidingGemmaFile) -> dict[str, Any]:
    """Gemma (arXiv 2403.08295), and the fields that later versions keep."""
    return {**biases(keys), "norm_offset": 1.0, "embedding_scale": keys.hidden_size**0.5}


def sliding_gemma(keys: SlidingGemmaFile, pattern: int) -> dict[str, Any]:
    """Fields common to Gemma 2 (arXiv 2408.00118) and 3 (arXiv 2503.19786)."""
    return {
        **gemma(keys),
        "hidden_act": keys.hidden_activation,
        "windows": one_full_of(keys, pattern),
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
        "score_scale": keys.query_pre_attn_scalar**-0.5,
        "logit_softcap": keys.final_logit_softcapping or 0.0,
    }


def gemma2(keys: Gemma2File) -> dict[str, Any]:
    return {**sliding_gemma(keys, 2), "score_softcap": keys.attn_logit_softcapping or 0.0}


def gemma3(keys: Gemma3File) -> dict[str, Any]:
    return {**sliding_gemma(keys, keys.sliding_window_pattern), "qk_norm": True}


def granite(keys: GraniteFile | GraniteSwaFile | HyperClovaXFile) -> dict[str, Any]:
    return {**granite_factors(keys), "mlp_bias": keys.mlp_bias}


def granite_factors(keys: Any) -> dict[str, Any]:
    """Granite 3 (arXiv 2408.13359): factors of embeddings, scores, residuals and logits."""
    return {
        **biases(keys),
        "embedding_scale": keys.embedding_multiplier,
        "score_scale": keys.attention_multiplier,
        "residual_scale": keys.residual_multiplier,
        "logit_scale": 1 / keys.logits_scaling,
    }


def normed_outputs() -> dict[str, Any]:
    """Return the fields of families that norm the outputs of attention and MLP instead of their inputs."""
    return {
        "attention_norm": "",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "",
        "mlp_out_norm": "post_feedforward_layernorm",
    }


def granite_swa(keys: GraniteSwaFile) -> dict[str, Any]:
    """Granite with sliding windows, sinks, and a theta for each layer."""
    return {**granite(keys), **granite_windows(keys)}


def granite_windows(keys: GraniteWindows) -> dict[str, Any]:
    """Return the fields for Granite's windows, sinks, and layers without rotary embeddings (theta 0)."""
    thetas = keys.layer_rope_theta or (1,) * keys.num_hidden_layers
    rotates = tuple(theta > 0 for theta in thetas)
    return {"windows": keys.layer_windows, "sinks": True, "use_rope": rotates}


def olmo2(keys: Any) -> dict[str, Any]:
    """OLMo 2 (arXiv 2501.00656): the outputs of attention and MLP are normed instead of their inputs."""
    return {**biases(keys), **normed_outputs(), "qk_norm": True, "qk_norm_whole": True}


def phi3(keys: Phi3File) -> dict[str, Any]:
    """Phi-3 (arXiv 2404.14219) and Phi-4 (arXiv 2412.08905, 2503.01743)."""
    return {"fused": True, "windows": every_layer(keys)}


def phi(keys: PhiFile) -> dict[str, Any]:
    """Phi-1, 1.5 (arXiv 2309.05463) and 2."""
    return layer_normed_heads(keys) | {
        "layer_norm": True,
        "rms_norm_eps": keys.layer_norm_eps,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "parallel": True,
        "gated": False,
        "mlp_norm": "input_layernorm",
        "final_norm": "model.final_layernorm",
        "o_proj": "self_attn.dense",
        "up_proj": "mlp.fc1",
        "down_proj": "mlp.fc2",
    }


def layer_normed_heads(keys: PhiFile | StableLmFile) -> dict[str, Any]:
    """Return the fields for `qk_layernorm`, LayerNorm of queries and keys."""
    norms = {"q_norm": "self_attn.q_layernorm", "k_norm": "self_attn.k_layernorm"}
    return {"qk_norm": True, "qk_layer_norm": True, **norms} if keys.qk_layernorm else {}


def stablelm(keys: StableLmFile) -> dict[str, Any]:
    """StableLM 3B and 2 (arXiv 2402.17834). In the 12B, each head has a norm of its own."""
    found = {"layer_norm": True, "rms_norm_eps": keys.layer_norm_eps, "qkv_bias": keys.use_qkv_bias}
    if keys.qk_layernorm:
        found |= {**layer_normed_heads(keys), "qk_norm_heads": True, "qk_norm_apart": True}
    return found | ({"parallel": True, "mlp_norm": "input_layernorm"} if keys.use_parallel_residual else {})


def starcoder2(keys: Starcoder2File) -> dict[str, Any]:
    """StarCoder 2 (arXiv 2402.19173)."""
    return {
        "layer_norm": True,
        "rms_norm_eps": keys.norm_epsilon,
        **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), keys.use_bias),
        "gated": False,
        "up_proj": "mlp.c_fc",
        "down_proj": "mlp.c_proj",
        "windows": every_layer(keys),
    }


def ministral3(keys: Ministral3File) -> dict[str, Any]:
    """Ministral 3: queries beyond the original length are scaled, as in Llama 4."""
    growth, length = query_growth(keys)
    return {"windows": every_layer(keys), "query_growth": growth, "query_length": length}


def cwm(keys: CwmFile) -> dict[str, Any]:
    """CWM (arXiv 2510.02387): the first of four layers has no window."""
    return {"mlp_bias": keys.mlp_bias, "windows": keys.windows(i % 4 > 0 for i in range(keys.num_hidden_layers))}


def seed_oss(keys: SeedOssFile) -> dict[str, Any]:
    return {"qkv_bias": keys.attention_bias, "o_bias": keys.attention_out_bias, "mlp_bias": keys.mlp_bias}


def exaone4(keys: Exaone4File) -> dict[str, Any]:
    """EXAONE 4 (arXiv 2507.11407): only the outputs of attention and MLP are normed."""
    return {**normed_outputs(), **exaone_attention(keys)}


def exaone_attention(keys: Any) -> dict[str, Any]:
    """Attention of EXAONE 4 and K-EXAONE: if some layers have windows, only these have rotary embeddings."""
    pattern = keys.sliding_window_pattern
    windows = one_full_of(keys, pattern) if isinstance(pattern, int) and pattern else keys.windows(())
    windows = windows or (0,) * keys.num_hidden_layers
    rotates = tuple(keys.sliding_window is None or window > 0 for window in windows)
    return {"qk_norm": True, "windows": windows, "use_rope": rotates}


def hyperclovax(keys: HyperClovaXFile) -> dict[str, Any]:
    """HyperCLOVA X (arXiv 2506.22403): Granite's factors, and norms of outputs in addition."""
    norms = {"attention_out_norm": "post_norm1", "mlp_out_norm": "post_norm2"} if keys.use_post_norm else {}
    scale = keys.attention_multiplier or 0.0
    return {**granite(keys), **norms, "score_scale": scale, "logit_scale": keys.logits_scaling}


def vaultgemma(keys: Gemma2File) -> dict[str, Any]:
    """VaultGemma (arXiv 2510.15001): Gemma 2 without norms of outputs."""
    return {**gemma2(keys), "attention_out_norm": "", "mlp_out_norm": ""}


def ernie45(keys: Ernie45File) -> dict[str, Any]:
    biased = bool(keys.use_bias)
    return {"interleaved": True, "qkv_bias": biased, "o_bias": biased, "mlp_bias": biased}


def hunyuan(keys: Any) -> dict[str, Any]:
    """Hunyuan: q and k are normed after their rotation."""
    norms = {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"}
    return {**biases(keys), **norms, "qk_norm": True, "qk_norm_last": True}


def ungated(keys: ArceeFile | Jais2File | NemotronFile) -> dict[str, Any]:
    """Return the fields common to families whose MLPs have no gate."""
    return {**biases(keys), "mlp_bias": keys.mlp_bias, "gated": False}


def jais2(keys: Jais2File) -> dict[str, Any]:
    return {**ungated(keys), "layer_norm": True, "rms_norm_eps": keys.layer_norm_eps}


def nemotron(keys: NemotronFile) -> dict[str, Any]:
    """Nemotron (arXiv 2402.16819): squared ReLU, and LayerNorm whose weights are stored minus 1."""
    return {**ungated(keys), "layer_norm": True, "rms_norm_eps": keys.norm_eps, "norm_offset": 1.0}


def glm(keys: GlmFile) -> dict[str, Any]:
    """GLM-4 (arXiv 2406.12793) in transformers' layout."""
    return {"interleaved": True, "qkv_bias": keys.attention_bias, "gate_up_proj": "mlp.gate_up_proj"}


def glm4(keys: Glm4File) -> dict[str, Any]:
    """GLM-4-0414: norms of outputs in addition."""
    return {
        **glm(keys),
        "attention_out_norm": "post_self_attn_layernorm",
        "mlp_out_norm": "post_mlp_layernorm",
    }


def cohere(keys: CohereFile) -> dict[str, Any]:
    """Command R and Aya (arXiv 2412.04261). In Command R+, queries and keys have a LayerNorm."""
    norms = ("qk_norm", "qk_layer_norm", "qk_norm_heads") if keys.use_qk_norm else ()
    return {**shared_layer_norm(keys), **dict.fromkeys(norms, True)}


def shared_layer_norm(keys: Any) -> dict[str, Any]:
    """Return the fields common to Cohere's families: attention and MLP read one LayerNorm, which has no bias."""
    return {
        **biases(keys),
        "layer_norm": True,
        "norm_bias": False,
        "rms_norm_eps": keys.layer_norm_eps,
        "parallel": True,
        "mlp_norm": "input_layernorm",
        "interleaved": True,
        "logit_scale": keys.logit_scale,
    }


def cohere2(keys: Cohere2File) -> dict[str, Any]:
    """Command R7B and A (arXiv 2504.00698): rotary embeddings in layers with a window."""
    windows = one_full_of(keys, keys.sliding_window_pattern)
    return {**shared_layer_norm(keys), "windows": windows, "use_rope": tuple(window > 0 for window in windows)}


def apertus(keys: ApertusFile) -> dict[str, Any]:
    """Apertus (arXiv 2509.14233)."""
    names = {"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}
    return {**biases(keys), **names, "qk_norm": True, "gated": False}


def nanochat(keys: NanoChatFile) -> dict[str, Any]:
    """nanochat: norms have no weights, the embeddings are normed too, and q and k after their rotation."""
    return {
        **biases(keys),
        "norm_weight": False,
        "embedding_norm": True,
        "qk_norm": True,
        "qk_norm_last": True,
        "gated": False,
        "up_proj": "mlp.fc1",
        "down_proj": "mlp.fc2",
        "logit_softcap": keys.final_logit_softcapping or 0.0,
    }


def olmo(keys: OlmoFile) -> dict[str, Any]:
    """OLMo (arXiv 2402.00838): LayerNorm without weights and biases."""
    norms = {"layer_norm": True, "norm_weight": False, "rms_norm_eps": 1e-5}
    return {**biases(keys), **norms, "clip_qkv": keys.clip_qkv or 0.0}
