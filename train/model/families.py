"""The model families, one entry each: what their config.json may hold, and in what they differ from a plain LLaMA.

Another family is a class of its keys (family_keys.py), where it has keys of its own, and an entry in FAMILIES; what a
family can have is the fields of `ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wgrad.train.model.config_file import ConfigFile, LayerTypesFile
from wgrad.train.model.family_keys import (
    ApertusFile,
    ArceeFile,
    Cohere2File,
    CwmFile,
    Ernie45File,
    Exaone4File,
    Gemma2File,
    Gemma3File,
    GemmaFile,
    Glm4File,
    GlmFile,
    GraniteFile,
    GraniteHybridFile,
    HeliumFile,
    HunYuanFile,
    HyperClovaXFile,
    InternLm3File,
    IQuestCoderFile,
    Jais2File,
    LlamaFile,
    Ministral3File,
    MistralFile,
    NanoChatFile,
    NemotronFile,
    Olmo2File,
    Olmo3File,
    OlmoFile,
    Phi3File,
    PhiFile,
    Qwen2File,
    Qwen3File,
    SeedOssFile,
    SlidingGemmaFile,
    SmolLM3File,
    StableLmFile,
    Starcoder2File,
)


@dataclass(frozen=True)
class Family:
    """model_type: what stands for the architecture's name where a config.json has none. keys: what its config.json
    holds. variant: from those, the fields of `ModelConfig` that are not a plain LLaMA's. gguf: llama.cpp's name of the
    architecture, "" where it is not written into GGUF."""

    model_type: str
    keys: type[ConfigFile]
    variant: Callable[[Any], dict[str, Any]]
    gguf: str


# ---- variants --------------------------------------------------------------------------------------
def _biases(keys: Any) -> dict[str, Any]:
    return {"qkv_bias": keys.attention_bias, "o_bias": keys.attention_bias}


def _llama(keys: Any) -> dict[str, Any]:
    return {**_biases(keys), "mlp_bias": keys.mlp_bias}


def _every_layer(keys: Any) -> tuple[int, ...]:
    """`sliding_window` in all layers; 0 where it is null."""
    result: tuple[int, ...] = (keys.sliding_window or 0,) * keys.num_hidden_layers
    return result


def _mistral(keys: MistralFile) -> dict[str, Any]:
    return {"windows": keys.windows([True] * keys.num_hidden_layers)}


def _upper_windows(keys: Qwen2File) -> tuple[int, ...]:
    return keys.windows(i >= keys.max_window_layers for i in range(keys.num_hidden_layers))


def _smollm3(keys: SmolLM3File) -> dict[str, Any]:
    """Every fourth layer has no rotary embeddings; `no_rope_layers` holds 1 where a layer has them."""
    if keys.no_rope_layers is not None:
        rotates = tuple(bool(layer) for layer in keys.no_rope_layers)
    else:
        rotates = tuple((i + 1) % keys.no_rope_layer_interval != 0 for i in range(keys.num_hidden_layers))
    # Without a list the layers without rotary embeddings slide, if any do; a list counts by itself.
    windows = keys.windows(keys.use_sliding_window and not layer for layer in rotates)
    return {**_biases(keys), "mlp_bias": keys.mlp_bias, "use_rope": rotates, "windows": windows}


def _one_full_of(keys: LayerTypesFile, pattern: int) -> tuple[int, ...]:
    """Windows where every `pattern`-th layer has none, unless `layer_types` names those."""
    return keys.windows((i + 1) % pattern != 0 for i in range(keys.num_hidden_layers))


def _gemma(keys: GemmaFile | SlidingGemmaFile) -> dict[str, Any]:
    """Gemma (arXiv 2403.08295), and what the later ones keep."""
    return {**_biases(keys), "norm_offset": 1.0, "embedding_scale": keys.hidden_size**0.5}


def _sliding_gemma(keys: SlidingGemmaFile, pattern: int) -> dict[str, Any]:
    """Common parts of Gemma 2 (arXiv 2408.00118) and 3 (arXiv 2503.19786)."""
    return {
        **_gemma(keys),
        "hidden_act": keys.hidden_activation,
        "windows": _one_full_of(keys, pattern),
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
        "score_scale": keys.query_pre_attn_scalar**-0.5,
        "logit_softcap": keys.final_logit_softcapping or 0.0,
    }


def _gemma2(keys: Gemma2File) -> dict[str, Any]:
    return {**_sliding_gemma(keys, 2), "score_softcap": keys.attn_logit_softcapping or 0.0}


def _gemma3(keys: Gemma3File) -> dict[str, Any]:
    return {**_sliding_gemma(keys, keys.sliding_window_pattern), "qk_norm": True}


def _granite(keys: GraniteFile | HyperClovaXFile) -> dict[str, Any]:
    """Granite 3 (arXiv 2408.13359): four factors."""
    return {
        **_biases(keys),
        "mlp_bias": keys.mlp_bias,
        "embedding_scale": keys.embedding_multiplier,
        "score_scale": keys.attention_multiplier,
        "residual_scale": keys.residual_multiplier,
        "logit_scale": 1 / keys.logits_scaling,
    }


def _normed_outputs() -> dict[str, Any]:
    return {
        "attention_norm": "",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "",
        "mlp_out_norm": "post_feedforward_layernorm",
    }


def _olmo2(keys: Olmo2File | Olmo3File) -> dict[str, Any]:
    """OLMo 2 (arXiv 2501.00656): norms of the outputs of attention and MLP, none before them."""
    return {**_biases(keys), **_normed_outputs(), "qk_norm": True, "qk_norm_whole": True}


def _phi3(keys: Phi3File) -> dict[str, Any]:
    """Phi-3 (arXiv 2404.14219) and Phi-4 (arXiv 2412.08905, 2503.01743)."""
    return {"fused": True, "windows": _every_layer(keys)}


def _phi(keys: PhiFile) -> dict[str, Any]:
    """Phi-1, 1.5 (arXiv 2309.05463) and 2. Its own dropout (resid_pdrop) is left out: an adapter has one."""
    return {
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


def _stablelm(keys: StableLmFile) -> dict[str, Any]:
    """StableLM 3B and 2 (arXiv 2402.17834)."""
    found = {"layer_norm": True, "rms_norm_eps": keys.layer_norm_eps, "qkv_bias": keys.use_qkv_bias}
    return found | ({"parallel": True, "mlp_norm": "input_layernorm"} if keys.use_parallel_residual else {})


def _starcoder2(keys: Starcoder2File) -> dict[str, Any]:
    """StarCoder 2 (arXiv 2402.19173)."""
    return {
        "layer_norm": True,
        "rms_norm_eps": keys.norm_epsilon,
        **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), keys.use_bias),
        "gated": False,
        "up_proj": "mlp.c_fc",
        "down_proj": "mlp.c_proj",
        "windows": _every_layer(keys),
    }


def _ministral3(keys: Ministral3File) -> dict[str, Any]:
    """Ministral 3: queries beyond the original length are scaled, as in Llama 4."""
    growth, length = keys.growth
    return {"windows": _every_layer(keys), "query_growth": growth, "query_length": length}


def _cwm(keys: CwmFile) -> dict[str, Any]:
    """CWM (arXiv 2510.02387): the first of four layers has no window."""
    return {"mlp_bias": keys.mlp_bias, "windows": keys.windows(i % 4 > 0 for i in range(keys.num_hidden_layers))}


def _seed_oss(keys: SeedOssFile) -> dict[str, Any]:
    return {"qkv_bias": keys.attention_bias, "o_bias": keys.attention_out_bias, "mlp_bias": keys.mlp_bias}


def _exaone4(keys: Exaone4File) -> dict[str, Any]:
    """EXAONE 4 (arXiv 2507.11407): where layers have windows, only those have rotary embeddings."""
    pattern = keys.sliding_window_pattern
    windows = _one_full_of(keys, pattern) if isinstance(pattern, int) and pattern else keys.windows(())
    windows = windows or (0,) * keys.num_hidden_layers
    rotates = tuple(keys.sliding_window is None or window > 0 for window in windows)
    return {**_normed_outputs(), "qk_norm": True, "windows": windows, "use_rope": rotates}


def _hyperclovax(keys: HyperClovaXFile) -> dict[str, Any]:
    """HyperCLOVA X (arXiv 2506.22403): Granite's factors, and norms of outputs as well."""
    norms = {"attention_out_norm": "post_norm1", "mlp_out_norm": "post_norm2"} if keys.use_post_norm else {}
    scale = keys.attention_multiplier or 0.0
    return {**_granite(keys), **norms, "score_scale": scale, "logit_scale": keys.logits_scaling}


def _vaultgemma(keys: Gemma2File) -> dict[str, Any]:
    """VaultGemma (arXiv 2510.15001): Gemma 2 without norms of outputs."""
    return {**_gemma2(keys), "attention_out_norm": "", "mlp_out_norm": ""}


def _ernie45(keys: Ernie45File) -> dict[str, Any]:
    biased = bool(keys.use_bias)
    return {"interleaved": True, "qkv_bias": biased, "o_bias": biased, "mlp_bias": biased}


def _granite_hybrid(keys: GraniteHybridFile) -> dict[str, Any]:
    """Granite 4, dense: gate and up are one projection, and there may be no rotary embeddings."""
    return {
        **_biases(keys),
        "embedding_scale": keys.embedding_multiplier or 1.0,
        "score_scale": keys.attention_multiplier or 1.0,
        "residual_scale": keys.residual_multiplier or 1.0,
        "logit_scale": 1 / (keys.logits_scaling or 1.0),
        "use_rope": (keys.position_embedding_type == "rope",) * keys.num_hidden_layers,
        "intermediate_size": keys.shared_intermediate_size,
        "gate_up_proj": "shared_mlp.input_linear",
        "down_proj": "shared_mlp.output_linear",
    }


def _hunyuan(keys: HunYuanFile) -> dict[str, Any]:
    norms = {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"}
    return {**_biases(keys), **norms, "qk_norm": True, "qk_norm_last": True}


def _ungated(keys: ArceeFile | Jais2File | NemotronFile) -> dict[str, Any]:
    return {**_biases(keys), "mlp_bias": keys.mlp_bias, "gated": False}


def _jais2(keys: Jais2File) -> dict[str, Any]:
    return {**_ungated(keys), "layer_norm": True, "rms_norm_eps": keys.layer_norm_eps}


def _nemotron(keys: NemotronFile) -> dict[str, Any]:
    """Nemotron (arXiv 2402.16819): squared ReLU, and LayerNorm whose files hold weight - 1."""
    return {**_ungated(keys), "layer_norm": True, "rms_norm_eps": keys.norm_eps, "norm_offset": 1.0}


def _glm(keys: GlmFile) -> dict[str, Any]:
    """GLM-4 (arXiv 2406.12793) as transformers has it."""
    return {"interleaved": True, "qkv_bias": keys.attention_bias, "gate_up_proj": "mlp.gate_up_proj"}


def _glm4(keys: Glm4File) -> dict[str, Any]:
    """GLM-4-0414: norms of outputs as well."""
    return {
        **_glm(keys),
        "attention_out_norm": "post_self_attn_layernorm",
        "mlp_out_norm": "post_mlp_layernorm",
    }


def _cohere2(keys: Cohere2File) -> dict[str, Any]:
    """Command R7B and A (arXiv 2504.00698): rotary embeddings in layers with a window."""
    windows = _one_full_of(keys, keys.sliding_window_pattern)
    return {
        **_biases(keys),
        "layer_norm": True,
        "norm_bias": False,
        "rms_norm_eps": keys.layer_norm_eps,
        "parallel": True,
        "mlp_norm": "input_layernorm",
        "interleaved": True,
        "logit_scale": keys.logit_scale,
        "windows": windows,
        "use_rope": tuple(window > 0 for window in windows),
    }


def _apertus(keys: ApertusFile) -> dict[str, Any]:
    """Apertus (arXiv 2509.14233)."""
    names = {"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}
    return {**_biases(keys), **names, "qk_norm": True, "gated": False}


def _nanochat(keys: NanoChatFile) -> dict[str, Any]:
    """nanochat: norms without weights, of the embeddings too, and of q and k once they are rotated."""
    return {
        **_biases(keys),
        "norm_weight": False,
        "embedding_norm": True,
        "qk_norm": True,
        "qk_norm_last": True,
        "gated": False,
        "up_proj": "mlp.fc1",
        "down_proj": "mlp.fc2",
        "logit_softcap": keys.final_logit_softcapping or 0.0,
    }


def _olmo(keys: OlmoFile) -> dict[str, Any]:
    """OLMo (arXiv 2402.00838): LayerNorm without weights and biases."""
    norms = {"layer_norm": True, "norm_weight": False, "rms_norm_eps": 1e-5}
    return {**_biases(keys), **norms, "clip_qkv": keys.clip_qkv or 0.0}


# SmolLM and SmolLM2 are LlamaForCausalLM; Qwen2.5 is Qwen2ForCausalLM.
FAMILIES = {
    "LlamaForCausalLM": Family("llama", LlamaFile, _llama, "llama"),
    "MistralForCausalLM": Family("mistral", MistralFile, _mistral, "llama"),
    "MinistralForCausalLM": Family("ministral", MistralFile, _mistral, "llama"),
    "Qwen2ForCausalLM": Family(
        "qwen2", Qwen2File, lambda keys: {"qkv_bias": True, "windows": _upper_windows(keys)}, "qwen2"
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3", Qwen3File, lambda keys: {**_biases(keys), "qk_norm": True, "windows": _upper_windows(keys)}, "qwen3"
    ),
    "SmolLM3ForCausalLM": Family("smollm3", SmolLM3File, _smollm3, "smollm3"),
    "GemmaForCausalLM": Family("gemma", GemmaFile, _gemma, "gemma"),
    "Gemma2ForCausalLM": Family("gemma2", Gemma2File, _gemma2, "gemma2"),
    "Gemma3ForCausalLM": Family("gemma3_text", Gemma3File, _gemma3, "gemma3"),
    "GraniteForCausalLM": Family("granite", GraniteFile, _granite, "granite"),
    "Olmo2ForCausalLM": Family("olmo2", Olmo2File, _olmo2, "olmo2"),
    "Olmo3ForCausalLM": Family(
        "olmo3", Olmo3File, lambda keys: {**_olmo2(keys), "windows": _one_full_of(keys, 4)}, "olmo2"
    ),
    "PhiForCausalLM": Family("phi", PhiFile, _phi, "phi2"),
    "Phi3ForCausalLM": Family("phi3", Phi3File, _phi3, "phi3"),
    "StableLmForCausalLM": Family("stablelm", StableLmFile, _stablelm, "stablelm"),
    "Starcoder2ForCausalLM": Family("starcoder2", Starcoder2File, _starcoder2, "starcoder2"),
    "Ministral3ForCausalLM": Family("ministral3", Ministral3File, _ministral3, ""),
    "CwmForCausalLM": Family("cwm", CwmFile, _cwm, ""),
    "SeedOssForCausalLM": Family("seed_oss", SeedOssFile, _seed_oss, ""),
    "Exaone4ForCausalLM": Family("exaone4", Exaone4File, _exaone4, ""),
    "HyperCLOVAXForCausalLM": Family("hyperclovax", HyperClovaXFile, _hyperclovax, ""),
    "VaultGemmaForCausalLM": Family("vaultgemma", Gemma2File, _vaultgemma, ""),
    "Ernie4_5ForCausalLM": Family("ernie4_5", Ernie45File, _ernie45, ""),
    "HeliumForCausalLM": Family(
        "helium",
        HeliumFile,
        lambda keys: {"interleaved": True, "qkv_bias": keys.attention_bias, "mlp_bias": keys.mlp_bias},
        "",
    ),
    "InternLM3ForCausalLM": Family("internlm3", InternLm3File, _llama, ""),
    "IQuestCoderForCausalLM": Family("iquestcoder", IQuestCoderFile, _llama, ""),
    "GraniteMoeHybridForCausalLM": Family("granitemoehybrid", GraniteHybridFile, _granite_hybrid, ""),
    "HunYuanDenseV1ForCausalLM": Family("hunyuan_v1_dense", HunYuanFile, _hunyuan, ""),
    "ArceeForCausalLM": Family("arcee", ArceeFile, _ungated, ""),
    "Jais2ForCausalLM": Family("jais2", Jais2File, _jais2, ""),
    "NemotronForCausalLM": Family("nemotron", NemotronFile, _nemotron, ""),
    "GlmForCausalLM": Family("glm", GlmFile, _glm, ""),
    "Glm4ForCausalLM": Family("glm4", Glm4File, _glm4, ""),
    "Cohere2ForCausalLM": Family("cohere2", Cohere2File, _cohere2, ""),
    "ApertusForCausalLM": Family("apertus", ApertusFile, _apertus, ""),
    "NanoChatForCausalLM": Family("nanochat", NanoChatFile, _nanochat, ""),
    "OlmoForCausalLM": Family("olmo", OlmoFile, _olmo, ""),
}
