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
    Gemma2File,
    Gemma3File,
    GemmaFile,
    GraniteFile,
    LlamaFile,
    MistralFile,
    Olmo2File,
    Olmo3File,
    Phi3File,
    PhiFile,
    Qwen2File,
    Qwen3File,
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


def _granite(keys: GraniteFile) -> dict[str, Any]:
    """Granite 3 (arXiv 2408.13359): four factors."""
    return {
        **_biases(keys),
        "mlp_bias": keys.mlp_bias,
        "embedding_scale": keys.embedding_multiplier,
        "score_scale": keys.attention_multiplier,
        "residual_scale": keys.residual_multiplier,
        "logit_scale": 1 / keys.logits_scaling,
    }


def _olmo2(keys: Olmo2File | Olmo3File) -> dict[str, Any]:
    """OLMo 2 (arXiv 2501.00656): norms of the outputs of attention and MLP, none before them."""
    return {
        **_biases(keys),
        "qk_norm": True,
        "qk_norm_whole": True,
        "attention_norm": "",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "",
        "mlp_out_norm": "post_feedforward_layernorm",
    }


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


# SmolLM and SmolLM2 are LlamaForCausalLM; Qwen2.5 is Qwen2ForCausalLM.
FAMILIES = {
    "LlamaForCausalLM": Family("llama", LlamaFile, lambda keys: {**_biases(keys), "mlp_bias": keys.mlp_bias}, "llama"),
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
}
