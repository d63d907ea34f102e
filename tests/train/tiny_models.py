"""config.json and random weights of a tiny model of each family, made without any model library."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.train.model.expert_keys import ExpertsFile
from wgrad.train.model.families import FAMILIES
from wgrad.train.model.load_config import parse_model_config
from wgrad.train.model.scored_keys import Ernie45MoeFile, ScoredFile
from wgrad.train.model.weights import constants, weight_specs

VOCAB = 300

# transformers' defaults of these are outside the vocabulary.
_IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
_GEMMA4 = {**_IDS, "tie_word_embeddings": True, "global_head_dim": 20, "sliding_window": 7, "rope_theta": None}
# Odd sizes of latents, and values narrower than keys.
_LATENT = {
    **_IDS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 22,
    "q_lora_rank": 26,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
}
# Gemma 4 with experts alongside the MLP.
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 32}
_MAMBA = {
    "mamba_expand": 3,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 16,
}
# Keys of a family's tiny model in addition to the common ones, by model_type.
_OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("smollm3", "phi", "phi3", "olmo2", "olmo3", "starcoder2", "hunyuan_v1_dense", "ernie4_5"), _IDS),
    **dict.fromkeys(("arcee", "jais2", "glm", "glm4", "cohere", "cohere2", "olmo", "nanochat"), _IDS),
    # A quarter of a head, the default, would be odd here.
    "stablelm": {**_IDS, "partial_rotary_factor": 0.5, "qk_layernorm": True},
    "granitemoehybrid": {
        "shared_intermediate_size": 88,
        "num_local_experts": 0,
        "layer_types": ["attention"] * 2,
        **_MAMBA,  # checked even without such layers
    },
    "nemotron_h": {
        **_IDS,
        "hybrid_override_pattern": "M*EM",
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_group": 3,
        "topk_group": 2,
        "moe_intermediate_size": 36,
        "moe_shared_expert_intermediate_size": 52,
        "routed_scaling_factor": 1.5,
        "mamba_num_heads": 6,
        "mamba_head_dim": 14,
        "n_groups": 2,
        "ssm_state_size": 10,
        "conv_kernel": 3,
        "chunk_size": 16,
        "time_step_min": 0.3,
    },
    "mamba2": {
        **_IDS,
        "head_dim": 24,
        "expand": 3,
        "n_groups": 2,
        "state_size": 10,
        "conv_kernel": 3,
        "chunk_size": 16,
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": [0.3, 1.1],
    },
    "bamba": {**_IDS, **_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {
        **_IDS,
        **_MAMBA,
        "mamba_d_ssm": 84,
        "key_multiplier": 0.4,
        "ssm_multipliers": [0.7, 1.3, 0.6, 1.1, 0.5],
    },
    "gpt_neox": {**_IDS, "hidden_act": "gelu", "rotary_pct": 0.5, "layer_norm_eps": 1e-4},
    "gpt2": {**_IDS, "activation_function": "gelu_new", "n_inner": 88, "layer_norm_epsilon": 1e-4},
    "gpt_neo": {
        **_IDS,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-4,
        "window_size": 7,
        "attention_types": [[["global", "local"], 1]],
    },
    "gpt_bigcode": {**_IDS, "n_inner": 88, "layer_norm_epsilon": 1e-4},
    "gptj": {**_IDS, "n_inner": 88, "layer_norm_epsilon": 1e-4, "rotary_dim": 6, "activation_function": "gelu_new"},
    "opt": {
        **_IDS,
        "ffn_dim": 88,
        "activation_function": "relu",
        "do_layer_norm_before": False,
        "word_embed_proj_dim": 22,
    },
    "falcon": {
        **_IDS,
        "activation": "gelu",
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "ffn_hidden_size": 88,
    },
    **dict.fromkeys(("arcee", "jais2", "nemotron", "nanochat"), {**_IDS, "hidden_act": "relu2"}),
    "seed_oss": {**_IDS, "attention_dropout": 0.0, "residual_dropout": 0.0},  # transformers creates it in training mode
    "apertus": {**_IDS, "hidden_act": "xielu"},
    **dict.fromkeys(("ministral3", "granite_swa"), _IDS),
    "lfm2": {**_IDS, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "routed_scaling_factor": 1.5},
    "lfm3": {
        **_IDS,
        "norm_eps": 1e-5,
        "sliding_window": 7,
        "layer_types": ["conv", "sliding_attention", "full_attention"],
        "num_hidden_layers": 3,
        "rope_theta": None,
    },
    "youtu": _LATENT,
    "llama4_text": {
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 52,
        "no_rope_layers": [1, 0],
        "num_hidden_layers": 2,
    },
    "granitemoe_swa": {"sliding_window": 7, "shared_intermediate_size": 52, "residual_multiplier": 0.3},
    "phimoe": {"router_jitter_noise": 0.2},
    "mellum": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"], "rope_theta": None},
    "hunyuan_v1_moe": {"moe_topk": 2, "moe_intermediate_size": None, "attention_dropout": 0.0},
    "exaone_moe": {
        "num_experts": 5,
        "n_group": 1,
        "topk_group": 1,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    **dict.fromkeys(
        ("flint", "kolibri1"),
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 7,
            "shared_expert_intermediate_size": 52,
            "mlp_only_layers": [1],
        },
    ),
    "laguna": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 7,
        "num_attention_heads_per_layer": [4, 6],
        "shared_expert_intermediate_size": 52,
        "moe_routed_scaling_factor": 1.5,
        "rope_theta": None,
    },
    "afmoe": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 7,
        "num_dense_layers": 1,
        "route_scale": 1.5,
    },
    "cohere2_moe": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 7,
        "num_shared_experts": 2,
        "rms_norm_eps": None,
    },
    "olmo_hybrid": {
        **_IDS,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "linear_num_key_heads": 2,
    },
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        {
            **_IDS,
            "head_dim": 20,
            "partial_rotary_factor": 0.4,
            "full_attention_interval": 2,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 10,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
    "cwm": {**_IDS, "bos_token_id": 1},
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "mistral4"), _LATENT),
    # With this theta, llama.cpp rounds yarn's range to the same: it includes all pairs.
    "gpt_oss": {
        "rope_theta": 3.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
        "sliding_window": 7,
    },
    "gemma3n_text": {
        **_IDS,
        "tie_word_embeddings": True,
        "sliding_window": 7,
        "altup_num_inputs": 3,
        "laurel_rank": 5,
        "activation_sparsity_pattern": [0.6, 0.0, 0.3, 0.0],
        "intermediate_size": [88, 72, 88, 40],
        "vocab_size_per_layer_input": VOCAB - 100,
        "hidden_size_per_layer_input": 10,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "gemma4_text": {
        **_GEMMA4,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 10,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "gemma4_unified_text": {**_GEMMA4, "layer_types": ["sliding_attention", "full_attention"]},
}


def tiny_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    """Return the config.json of a tiny model with odd sizes, none of which divides a tile."""
    kind = FAMILIES[architecture].model_type
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": kind,
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    config |= _OWN.get(kind, {})
    if issubclass(FAMILIES[architecture].keys, ExpertsFile):
        config = {"num_experts_per_tok": 2, "moe_intermediate_size": 36} | config
        if not issubclass(FAMILIES[architecture].keys, ScoredFile | Ernie45MoeFile):
            config |= {"num_experts": 5, "num_local_experts": 5}
        config |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    if kind in ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text"):
        config["shared_expert_intermediate_size"] = 52
    if kind in ("axk1", "glm4_moe", "solar_open", "dots1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4"):
        config |= {"n_routed_experts": 6, "n_shared_experts": 2, "n_group": 3, "topk_group": 2}
        config |= {"first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "sliding_window": None}
    if kind == "ernie4_5_moe":
        config |= {"moe_num_experts": 5, "moe_k": 2}
    if kind == "mistral":
        config["sliding_window"] = None
    if kind == "ministral":  # for which transformers requires a window even if no layer uses it
        config["sliding_window"] = 64
        config["layer_types"] = ["full_attention"] * (config | changes)["num_hidden_layers"]
    config |= changes
    for given, other in (("num_experts", "num_local_experts"), ("num_local_experts", "num_experts")):
        if given in changes and other not in changes and other in config:  # which one counts depends on the family
            config[other] = changes[given]
    if kind == "falcon":
        del config["head_dim"]  # transformers takes no such key
    if kind == "mamba2":
        config["num_heads"] = config["expand"] * config["hidden_size"] // config["head_dim"]
    if "qk_rope_head_dim" in config:  # as in transformers' files
        config["head_dim"] = config["qk_rope_head_dim"] + (config["qk_nope_head_dim"] if kind == "mistral4" else 0)
    return config


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Return random float32 weights, large enough for attention and gradients to be far from trivial."""
    generator = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}
    for spec in weight_specs(parse_model_config(config)):
        value = generator.standard_normal(spec.shape).astype(np.float32)
        if (
            spec.name.endswith((".A_log", ".dt_bias", ".D")) and ".linear_attn." not in spec.name
        ):  # so that a state lasts some tokens
            value *= 0.5
        elif spec.kind == "norm":
            value = 1 + 0.2 * value
        elif spec.kind == "bias":
            value *= 0.3
        else:
            value *= 2.0 / np.sqrt(spec.shape[-1])
        if ".attn.attention.q_proj." in spec.name:  # GPT-Neo does not scale its scores
            value *= 0.3
        value = as_in_files(spec.name, value, config)
        if "_layernorm." in spec.name and value.ndim == 2:  # StableLM's files have each head's weight by itself
            weights |= {spec.name.replace(".weight", f".norms.{i}.weight"): row for i, row in enumerate(value)}
        else:
            weights[name_in_files(spec.name, config)] = value
    return weights | {
        name: np.array(value, np.float32) for name, value in constants(parse_model_config(config)).items()
    }


# Beginnings of our names, and of those in transformers' model.
_GPT2 = (
    ("model.embed_tokens.", "transformer.wte."),
    ("model.layers.", "transformer.h."),
    ("model.", "transformer."),
)
BEGINNINGS = {
    "opt": (("model.", "model.decoder."),),
    "gpt_neox": (("model.embed_tokens.", "gpt_neox.embed_in."), ("model.", "gpt_neox.")),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj", "gpt_neo"), _GPT2),
    "falcon": (
        ("model.embed_tokens.", "transformer.word_embeddings."),
        ("model.layers.", "transformer.h."),
        ("model.", "transformer."),
    ),
}


def name_in_files(name: str, config: dict[str, Any]) -> str:
    """Return a weight's name in transformers' model."""
    for ours, theirs in BEGINNINGS.get(config["model_type"], ()):
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    if config["model_type"] in ("nemotron_h", "mamba2"):
        name = name.replace(".embed_tokens.", ".embeddings.")
    return name.replace("model.", "backbone.", 1) if config["model_type"] == "mamba2" else name


def as_in_files(name: str, value: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Return a weight in transformers' layout, which for experts of gpt-oss and Llama 4 is [experts, in, out]."""
    turned = config["model_type"] in ("gpt_oss", "llama4_text") and value.ndim == 3
    turned |= config["model_type"] == "gpt2" and value.ndim == 2 and ".layers." in name
    return np.ascontiguousarray(value.swapaxes(-1, -2)) if turned else value
