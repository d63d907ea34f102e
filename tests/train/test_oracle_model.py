"""Logits, loss and every gradient of small random models against transformers.

The oracle is transformers in float64, with its norms, which compute in float32, replaced by float64 ones. The limit is
twice (logits, loss) or three times (gradients) the error of transformers in float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.family_table import PAGE, counted, page
from tests.train.conftest import distance
from tests.train.model_oracle import (
    TOKENS,
    batch,
    check_against_the_oracle,
    exact_norms,
    full_model,
    load_oracle,
    make_inputs,
    oracle,
    torch,
    transformers,
)
from tests.train.tiny_models import GEMMA4_EXPERTS
from wgrad.autograd import functional as F
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.contract import Device
from wgrad.train.files.safetensors_files import read_entries
from wgrad.train.model import model as model_file
from wgrad.train.model.load_config import load_model_config
from wgrad.train.model.save_model import save_full
from wgrad.train.model.weights import weight_specs

pytestmark = pytest.mark.oracle

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# The padding id's row has no gradient in torch.
GEMMA2: dict[str, Any] = {
    "architecture": "Gemma2ForCausalLM",
    "num_hidden_layers": 3,
    "sliding_window": 7,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
    "pad_token_id": None,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.1] * 6, "long_factor": [1.5, 2.0, 3.0, 4.5, 7.0, 9.0]}
UNGROUPED: dict[str, Any] = {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "mlp_bias": True}
UNGROUPED_LATENTS = UNGROUPED | {"moe_latent_size": 22}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied": {"tie_word_embeddings": True},
    "llama_biases": {"attention_bias": True, "mlp_bias": True},
    "llama_gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "llama_linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "hidden_act": "gelu"},
    "llama_llama3": {"rope_scaling": LLAMA3, "head_dim": 24},
    "llama_yarn": {"rope_scaling": YARN, "head_dim": 24, "hidden_act": "quick_gelu"},
    "llama_yarn_factor": {"rope_parameters": {**YARN, "attention_factor": 1.3, "rope_theta": 500.0}, "head_dim": 24},
    "mistral": {"architecture": "MistralForCausalLM", "sliding_window": 7},
    "mistral_full": {"architecture": "MistralForCausalLM"},
    "ministral": {
        "architecture": "MinistralForCausalLM",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 7,
    },
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "qwen2_sliding": {
        "architecture": "Qwen2ForCausalLM",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 20},
    "qwen3_5": {
        "architecture": "Qwen3_5ForCausalLM",
        "num_hidden_layers": 3,
        "full_attention_interval": 3,
        "attention_bias": True,
        "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 3,
    },
    "qwen3_5_moe": {"architecture": "Qwen3_5MoeForCausalLM", "linear_num_value_heads": 2},
    "qwen3_next": {
        "architecture": "Qwen3NextForCausalLM",
        "num_hidden_layers": 3,
        "full_attention_interval": 3,
        "linear_num_value_heads": 6,
        "mlp_only_layers": [1],
    },
    "smollm3": {"architecture": "SmolLM3ForCausalLM", "num_hidden_layers": 4, "tie_word_embeddings": True},
    "gemma": {
        "architecture": "GemmaForCausalLM",
        "tie_word_embeddings": True,
        "hidden_act": "gelu",
        "pad_token_id": None,
    },
    "gemma2": {**GEMMA2, "head_dim": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma2_uncapped": {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3": {
        **GEMMA2,
        "architecture": "Gemma3ForCausalLM",
        "head_dim": 20,
        "sliding_window_pattern": 3,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma3n": {"architecture": "Gemma3nForCausalLM", "final_logit_softcapping": 3.0},
    "gemma4": {"architecture": "Gemma4ForCausalLM", "final_logit_softcapping": 3.0, "use_double_wide_mlp": True},
    "gemma4_keys_as_values": {
        "architecture": "Gemma4ForCausalLM",
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.3, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
        },
    },
    "gemma4_experts": {
        "architecture": "Gemma4ForCausalLM",
        **GEMMA4_EXPERTS,
        "moe_intermediate_size": 36,
        "final_logit_softcapping": 3.0,
    },
    "gemma4_unified": {"architecture": "Gemma4UnifiedForCausalLM"},
    "granite": {
        "architecture": "GraniteForCausalLM",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.3,
        "logits_scaling": 5.0,
    },
    "olmo2": {"architecture": "Olmo2ForCausalLM", "head_dim": 16},
    "olmo3": {
        "architecture": "Olmo3ForCausalLM",
        "num_hidden_layers": 4,
        "sliding_window": 7,
        "rope_scaling": YARN,
    },
    "olmo_hybrid": {"architecture": "OlmoHybridForCausalLM", "attention_bias": True, "linear_conv_kernel_dim": 3},
    "olmo_hybrid_positive": {
        "architecture": "OlmoHybridForCausalLM",
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
        "linear_allow_neg_eigval": False,
    },
    "gpt_neox": {"architecture": "GPTNeoXForCausalLM"},
    "gpt_neox_sequential": {
        "architecture": "GPTNeoXForCausalLM",
        "use_parallel_residual": False,
        "attention_bias": False,
        "hidden_act": "gelu_fast",
        "rotary_pct": 0.9,
        "rotary_emb_base": 500.0,
        "tie_word_embeddings": True,
    },
    "falcon": {"architecture": "FalconForCausalLM"},
    "falcon_one_norm": {
        "architecture": "FalconForCausalLM",
        "num_ln_in_parallel_attn": 1,
        "bias": True,
        "layer_norm_epsilon": 1e-3,
        "rope_theta": 500.0,
    },
    "falcon_7b": {
        "architecture": "FalconForCausalLM",
        "new_decoder_architecture": False,
        "ffn_hidden_size": None,
        "tie_word_embeddings": True,
    },
    "falcon_sequential": {
        "architecture": "FalconForCausalLM",
        "new_decoder_architecture": False,
        "multi_query": False,
        "num_kv_heads": None,
        "parallel_attn": False,
        "bias": True,
    },
    "gpt2": {"architecture": "GPT2LMHeadModel"},
    "gpt_neo": {"architecture": "GPTNeoForCausalLM"},
    "gpt2_tied": {
        "architecture": "GPT2LMHeadModel",
        "tie_word_embeddings": True,
        "n_inner": None,
        "scale_attn_weights": False,
        "scale_attn_by_inverse_layer_idx": True,
        "reorder_and_upcast_attn": True,
        "activation_function": "gelu",
    },
    "gpt_bigcode": {"architecture": "GPTBigCodeForCausalLM"},
    "gpt_bigcode_heads": {"architecture": "GPTBigCodeForCausalLM", "multi_query": False, "tie_word_embeddings": True},
    "gptj": {"architecture": "GPTJForCausalLM"},
    "opt": {"architecture": "OPTForCausalLM"},
    "opt_before": {"architecture": "OPTForCausalLM", "do_layer_norm_before": True, "word_embed_proj_dim": 90},
    "opt_plain": {
        "architecture": "OPTForCausalLM",
        "enable_bias": False,
        "layer_norm_elementwise_affine": False,
        "do_layer_norm_before": True,
        "word_embed_proj_dim": None,
        "activation_function": "gelu",
        "tie_word_embeddings": True,
    },
    "phi": {"architecture": "PhiForCausalLM", "hidden_act": "gelu_new", "layer_norm_eps": 1e-3},
    "phi_normed": {"architecture": "PhiForCausalLM", "qk_layernorm": True, "hidden_act": "gelu_new"},
    "phi_tied": {"architecture": "PhiForCausalLM", "partial_rotary_factor": 0.9, "tie_word_embeddings": True},
    "stablelm": {"architecture": "StableLmForCausalLM", "use_qkv_bias": True, "qk_layernorm": False},
    "stablelm_parallel": {"architecture": "StableLmForCausalLM", "use_parallel_residual": True},
    "starcoder2": {
        "architecture": "Starcoder2ForCausalLM",
        "norm_epsilon": 1e-3,
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": 7,
        "tie_word_embeddings": True,
    },
    "starcoder2_unbiased": {"architecture": "Starcoder2ForCausalLM", "use_bias": False},
    "ministral3": {
        "architecture": "Ministral3ForCausalLM",
        "rope_parameters": {
            **YARN,
            "original_max_position_embeddings": 7,
            "llama_4_scaling_beta": 0.4,
            "rope_theta": 500.0,
        },
        "original_max_position_embeddings": 5,  # counts before that of rope_parameters
        "sliding_window": 17,
    },
    "cwm": {
        "architecture": "CwmForCausalLM",
        "num_hidden_layers": 3,
        "sliding_window": 7,
        "rope_scaling": LLAMA3,
    },
    "seed_oss": {"architecture": "SeedOssForCausalLM", "head_dim": 20, "mlp_bias": True},
    "seed_oss_out_bias": {"architecture": "SeedOssForCausalLM", "attention_bias": False, "attention_out_bias": True},
    "exaone4": {"architecture": "Exaone4ForCausalLM", "num_hidden_layers": 4, "sliding_window": 7},
    "exaone4_full": {
        "architecture": "Exaone4ForCausalLM",
        "sliding_window": None,
        "layer_types": ["full_attention"] * 2,
    },
    "hyperclovax": {
        "architecture": "HyperCLOVAXForCausalLM",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.3,
        "logits_scaling": 0.2,
    },
    "hyperclovax_without_norms": {"architecture": "HyperCLOVAXForCausalLM", "use_post_norm": False},
    "vaultgemma": {**GEMMA2, "architecture": "VaultGemmaForCausalLM", "final_logit_softcapping": 3.0},
    "ernie4_5": {"architecture": "Ernie4_5ForCausalLM", "head_dim": 20, "use_bias": True},
    "helium": {"architecture": "HeliumForCausalLM", "attention_bias": True},
    "internlm3": {"architecture": "InternLM3ForCausalLM", "bias": True, "qkv_bias": True},
    "iquestcoder": {"architecture": "IQuestCoderForCausalLM"},
    "granite4": {
        "architecture": "GraniteMoeHybridForCausalLM",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.3,
        "logits_scaling": 5.0,
    },
    "granite_swa": {
        "architecture": "GraniteSWAForCausalLM",
        "num_hidden_layers": 5,
        "sliding_window": 7,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.3,
        "layer_rope_theta": [0, 500.0, 500.0, 0, 90.0],
    },
    "granite4_hybrid": {
        "architecture": "GraniteMoeHybridForCausalLM",
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.3,
        "mamba_proj_bias": True,
        "time_step_limit": [0.3, 0.9],
    },
    "granite4_experts": {
        "architecture": "GraniteMoeHybridForCausalLM",
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 5,
        "residual_multiplier": 0.3,
        "mamba_n_groups": 1,
    },
    "bamba": {"architecture": "BambaForCausalLM", "mlp_bias": True, "mamba_conv_bias": False},
    "falcon_h1": {
        "architecture": "FalconH1ForCausalLM",
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.3,
        "attention_in_multiplier": 1.4,
        "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.6,
        "mlp_multipliers": [0.9, 0.4],
        "attention_bias": True,
    },
    "mamba2": {"architecture": "Mamba2ForCausalLM"},
    "mamba2_biases": {
        "architecture": "Mamba2ForCausalLM",
        "use_bias": True,
        "use_conv_bias": False,
        "n_groups": 1,
        "tie_word_embeddings": True,
        "time_step_limit": [0.0, float("inf")],
    },
    "nemotron_h": {
        "architecture": "NemotronHForCausalLM",
        "hybrid_override_pattern": "M*-M",
        "use_bias": True,
        "mlp_bias": True,
    },
    "nemotron_h_experts": {"architecture": "NemotronHForCausalLM", "hybrid_override_pattern": "M-E*"},
    "nemotron_h_latents": {
        "architecture": "NemotronHForCausalLM",
        "hybrid_override_pattern": "EM",
        "moe_latent_size": 22,
        "mlp_bias": True,
    },
    "nemotron_h_ungrouped": {"architecture": "NemotronHForCausalLM", **UNGROUPED},
    "falcon_h1_norm_first": {"architecture": "FalconH1ForCausalLM", "mamba_rms_norm": True},
    "falcon_h1_no_norm": {
        "architecture": "FalconH1ForCausalLM",
        "mamba_proj_bias": True,
        "projectors_bias": True,
        "ssm_in_multiplier": 1.3,
        "attention_in_multiplier": 1.4,
    },
    "granite4_rope": {"architecture": "GraniteMoeHybridForCausalLM", "position_embedding_type": "rope"},
    "hunyuan": {"architecture": "HunYuanDenseV1ForCausalLM", "head_dim": 20, "attention_bias": True},
    "hunyuan_alpha": {
        "architecture": "HunYuanDenseV1ForCausalLM",
        "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "mscale": 1.0},
    },
    "arcee": {"architecture": "ArceeForCausalLM", "hidden_act": "relu2", "mlp_bias": True},
    "jais2": {"architecture": "Jais2ForCausalLM", "hidden_act": "relu2"},
    "nemotron": {"architecture": "NemotronForCausalLM", "hidden_act": "relu2", "norm_eps": 1e-3},
    "glm": {"architecture": "GlmForCausalLM", "hidden_act": "relu"},
    "glm4": {"architecture": "Glm4ForCausalLM", "attention_bias": False},
    "cohere": {"architecture": "CohereForCausalLM", "logit_scale": 0.3, "tie_word_embeddings": True},
    "cohere_normed": {"architecture": "CohereForCausalLM", "use_qk_norm": True, "attention_bias": True},
    "cohere2": {
        "architecture": "Cohere2ForCausalLM",
        "num_hidden_layers": 4,
        "sliding_window": 7,
        "logit_scale": 0.3,
        "tie_word_embeddings": True,
    },
    "apertus": {"architecture": "ApertusForCausalLM", "hidden_act": "xielu", "rope_scaling": LLAMA3},
    "nanochat": {"architecture": "NanoChatForCausalLM", "hidden_act": "relu2", "final_logit_softcapping": 3.0},
    "olmo": {"architecture": "OlmoForCausalLM"},
    "lfm2": {
        "architecture": "Lfm2ForCausalLM",
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_multiple_of": 10,
    },
    "olmo_clipped": {"architecture": "OlmoForCausalLM", "clip_qkv": 0.7},
    "solar_open": {"architecture": "SolarOpenForCausalLM", "attention_bias": True, "norm_topk_prob": False},
    "glm4_moe": {"architecture": "Glm4MoeForCausalLM", "use_qk_norm": True, "attention_bias": True},
    "dots1": {
        "architecture": "Dots1ForCausalLM",
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "deepseek_v2": {
        "architecture": "DeepseekV2ForCausalLM",
        "topk_method": "group_limited_greedy",
        "attention_bias": True,
        "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    },
    "deepseek_v2_lite": {
        "architecture": "DeepseekV2ForCausalLM",
        "q_lora_rank": None,
        "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v3": {
        "architecture": "DeepseekV3ForCausalLM",
        "attention_bias": True,
        "norm_topk_prob": True,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "deepseek_v3_halves": {
        "architecture": "DeepseekV3ForCausalLM",
        "q_lora_rank": None,
        "rope_interleave": False,
        "v_head_dim": 16,
        "first_k_dense_replace": 0,
    },
    "axk1": {
        "architecture": "AXK1ForCausalLM",
        "num_hidden_layers": 3,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "attention_bias": True,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "glm4_moe_lite": {
        "architecture": "Glm4MoeLiteForCausalLM",
        "num_hidden_layers": 3,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "v_head_dim": 16,
    },
    "mistral4": {
        "architecture": "Mistral4ForCausalLM",
        "attention_bias": True,
        "rope_parameters": {
            **YARN,
            "original_max_position_embeddings": 7,
            "llama_4_scaling_beta": 0.4,
            "rope_theta": 500.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
    },
    "mistral4_plain": {
        "architecture": "Mistral4ForCausalLM",
        "q_lora_rank": None,
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
        "rope_interleave": False,
        "rope_parameters": {**YARN, "rope_theta": 500.0, "llama_4_scaling_beta": 0.0},
    },
    "minicpm3": {
        "architecture": "MiniCPM3ForCausalLM",
        "v_head_dim": None,
        "scale_emb": 3.0,
        "scale_depth": 0.9,
        "dim_model_base": 17,
        "rope_scaling": {"rope_type": "longrope", "short_factor": [1.1] * 3, "long_factor": [1.5, 2.0, 3.0]},
        "original_max_position_embeddings": 16,
    },
    "lfm2_moe": {
        "architecture": "Lfm2MoeForCausalLM",
        "num_hidden_layers": 3,
        "layer_types": ["conv", "conv", "full_attention"],
    },
    "lfm2_moe_without_bias": {"architecture": "Lfm2MoeForCausalLM", "use_expert_bias": False, "norm_topk_prob": False},
    "lfm3": {
        "architecture": "Lfm3ForCausalLM",
        "attention_bias": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.4, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
        },
    },
    "lfm3_plain": {"architecture": "Lfm3ForCausalLM", "use_sandwich_norm": False, "use_attention_gate": False},
    "llama4": {
        "architecture": "Llama4ForCausalLM",
        "num_hidden_layers": 4,
        "no_rope_layers": None,
        "interleave_moe_layer_step": 2,
        "rope_scaling": LLAMA3,
        "rope_theta": 500.0,
    },
    "llama4_plain": {"architecture": "Llama4ForCausalLM", "use_qk_norm": False, "attention_bias": True},
    "youtu": {"architecture": "YoutuForCausalLM", "attention_bias": True},
    "granite_moe_swa": {
        "architecture": "GraniteMoeSWAForCausalLM",
        "num_hidden_layers": 5,
        "sliding_window": 7,
        "shared_intermediate_size": 52,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.3,
        "layer_rope_theta": [0, 500.0, 500.0, 0, 90.0],
    },
    "mellum": {
        "architecture": "MellumForCausalLM",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "rope_parameters": {
            "full_attention": {**YARN, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
        },
    },
    "phimoe": {
        "architecture": "PhimoeForCausalLM",
        "attention_bias": True,
        "lm_head_bias": True,
        "sliding_window": 9,
        "rope_scaling": {
            **LONGROPE,
            "original_max_position_embeddings": 32,
            "short_mscale": 1.3,
            "long_mscale": 1.3,
        },
    },
    "hunyuan_moe": {"architecture": "HunYuanMoEV1ForCausalLM", "head_dim": 20, "attention_bias": True},
    "hy3": {
        "architecture": "HYV3ForCausalLM",
        "attention_bias": True,
        "mlp_bias": True,
        "num_shared_experts": 2,
        "mlp_layer_types": ["sparse", "dense"],
    },
    "laguna": {
        "architecture": "LagunaForCausalLM",
        "attention_bias": True,
        "num_attention_heads_per_layer": [6, 4, 2],
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {**YARN, "rope_theta": 500.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
        },
    },
    "laguna_elements": {
        "architecture": "LagunaForCausalLM",
        "gating": "per-element",
        "mlp_layer_types": ["sparse", "dense"],
        "num_attention_heads_per_layer": None,
    },
    "flint": {"architecture": "FlintForCausalLM", "attention_bias": True},
    "flint_softer": {
        "architecture": "FlintForCausalLM",
        "num_hidden_layers": 7,
        "layer_types": None,
        "mlp_only_layers": None,
        "norm_topk_prob": False,
    },
    "kolibri1": {"architecture": "Kolibri1ForCausalLM", "num_hidden_layers": 6, "layer_types": None},
    "kolibri1_normalized": {"architecture": "Kolibri1ForCausalLM", "norm_topk_prob": True},
    "exaone_moe": {
        "architecture": "ExaoneMoeForCausalLM",
        "num_shared_experts": 2,
        "num_experts": 6,
        "n_group": 3,
        "topk_group": 2,
    },
    "flex_olmo": {"architecture": "FlexOlmoForCausalLM"},
    "afmoe": {"architecture": "AfmoeForCausalLM", "mup_enabled": True},
    "cohere2_moe": {
        "architecture": "Cohere2MoeForCausalLM",
        "logit_scale": 0.3,
        "prefix_dense_intermediate_size": 52,
        "mlp_layer_types": ["sparse", "dense"],
    },
    "cohere2_moe_sigmoid": {
        "architecture": "Cohere2MoeForCausalLM",
        "logit_scale": 0.3,
        "expert_selection_fn": "sigmoid",
        "rms_norm_eps": 1e-5,
        "shared_expert_combination_strategy": "sum",
    },
    "ernie4_5_moe": {"architecture": "Ernie4_5_MoeForCausalLM", "use_bias": True, "tie_word_embeddings": False},
    "minimax_m2": {"architecture": "MiniMaxM2ForCausalLM", "rotary_dim": 6},
    "mixtral": {"architecture": "MixtralForCausalLM", "sliding_window": 7, "hidden_act": "relu2"},
    "olmoe": {"architecture": "OlmoeForCausalLM", "num_experts": 7, "num_experts_per_tok": 3, "clip_qkv": 0.7},
    "qwen2_moe": {
        "architecture": "Qwen2MoeForCausalLM",
        "use_sliding_window": True,
        "sliding_window": 7,
        "hidden_act": "gelu",
    },
    "qwen3_moe": {
        "architecture": "Qwen3MoeForCausalLM",
        "norm_topk_prob": True,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "head_dim": 20,
    },
    "granite_moe": {
        "architecture": "GraniteMoeForCausalLM",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.3,
        "logits_scaling": 5.0,
        "num_experts": 7,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
    },
    "granite_moe_shared": {
        "architecture": "GraniteMoeSharedForCausalLM",
        "shared_intermediate_size": 52,
        "residual_multiplier": 0.3,
        "logits_scaling": 5.0,
    },
    "gpt_oss": {
        "architecture": "GptOssForCausalLM",
        "num_hidden_layers": 3,
        "num_experts": 7,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "head_dim": 20,
        "swiglu_limit": 0.6,
        "swiglu_alpha": 1.3,
        "rope_theta": 500.0,
    },
    "phi3": {"architecture": "Phi3ForCausalLM", "sliding_window": 9},
    "phi3_longrope": {
        "architecture": "Phi3ForCausalLM",
        "rope_scaling": LONGROPE,
        "original_max_position_embeddings": 16,
    },
    "phi3_partial": {
        "architecture": "Phi3ForCausalLM",
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.5, 2.0, 3.0]},
        "original_max_position_embeddings": 16,
    },
    "phi3_shortrope": {
        "architecture": "Phi3ForCausalLM",
        "rope_scaling": {**LONGROPE, "rope_type": "su", "original_max_position_embeddings": 128},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_every_gradient_equal_transformers(case: str, make_checkpoint: Any, device: Device) -> None:
    options = dict(CASES[case])
    if "rope_parameters" in options:  # transformers 5 writes this instead of rope_theta
        options["rope_theta"] = None
    check_against_the_oracle(make_checkpoint(options.pop("architecture", "LlamaForCausalLM"), **options), device)


def test_errors_over_several_batches_are_those_of_a_plain_implementation(
    make_checkpoint: Any, wgpu_device: Any
) -> None:
    """For one batch an error may be small by chance, in transformers as well: for the first one here, a norm's gradient
    has 3.6 times its error, all of it from the order of sums in the forward's matmuls. Geometric means are alike."""
    folder = make_checkpoint("NemotronHForCausalLM", **UNGROUPED_LATENTS)
    loaded, errors = load_oracle(folder), []
    model, parameters = full_model(folder, wgpu_device)
    batches = [batch(model.config.vocab_size, seed=seed) for seed in (3, 4, 5, 6)]
    rounded, exact = ([oracle(loaded, t, *given)[2] for given in batches] for t in (torch.float32, torch.float64))
    names = [name for name, value in exact[0].items() if value.size > 6]
    for plain, true, (ids, targets) in zip(rounded, exact, batches, strict=True):
        wgpu_device.fill(parameters.grad, 0.0)
        model.loss(make_inputs(wgpu_device, ids, targets)).backward()
        ours = {name: wgpu_device.download(parameters.tensors[name].gradient) for name in names}
        errors.append([[distance(found[name], true[name]) for name in names] for found in (ours, plain)])
    found, expected = np.exp(np.log(errors).mean(0))
    assert (found < 1.5 * expected).all(), dict(zip(names, found / expected, strict=True))


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "StableLmForCausalLM"])
def test_full_training_saves_norm_weights_as_the_file_had_them(
    architecture: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    """Gemma 2's files hold weight - 1, StableLM's a weight for each head. Weights of norms do not decay."""
    folder, device = make_checkpoint(architecture, tie_word_embeddings=True), ReferenceDevice()
    assert not any(spec.decays for spec in weight_specs(load_model_config(folder)) if spec.kind == "norm")
    _, parameters = full_model(folder, device)
    save_full(tmp_path, folder, parameters.tensors, load_model_config(folder), lambda out: None)
    before, after = (read_entries(path / "model.safetensors", "") for path in (folder, tmp_path))
    assert before.keys() == after.keys()
    for name, entry in before.items():
        np.testing.assert_allclose(after[name].array(), entry.array(), atol=2**-23, err_msg=name)


def test_checkpointed_layers_give_the_same_gradients(make_checkpoint: Any, device: Device) -> None:
    folder = make_checkpoint("Qwen3ForCausalLM")
    ids, targets = batch(300)
    grads = []
    for checkpointing, keep in ((False, False), (True, False), (True, True)):
        model, parameters = full_model(folder, device)
        model.recompute, model.keep_attention = checkpointing, keep
        model.loss(make_inputs(device, ids, targets)).backward()
        grads.append(device.download(parameters.grad))
    np.testing.assert_array_equal(grads[0], grads[1])
    np.testing.assert_array_equal(grads[0], grads[2])


@pytest.mark.parametrize(("architecture", "last"), [("LlamaForCausalLM", 1), ("PhiForCausalLM", 2)])
def test_what_only_a_layers_output_needs_is_not_computed_again(
    make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, architecture: str, last: int
) -> None:
    """These are the last projection, and in a parallel block that of both halves."""
    model, _ = full_model(make_checkpoint(architecture), device := ReferenceDevice())
    model.recompute, left_out = True, []
    linear = F.linear

    def counted(*args: Any, **options: Any) -> Any:
        left_out.append(options.get("unread", False))
        return linear(*args, **options)

    monkeypatch.setattr(F, "linear", counted)
    loss = model.loss(make_inputs(device, *batch(300)))
    assert not any(left_out)
    loss.backward()
    assert sum(left_out) == last * model.config.num_hidden_layers


@pytest.mark.parametrize("architecture", ["PhiForCausalLM", "FalconForCausalLM"])
def test_a_parallel_block_in_chunks_of_its_rows_has_the_same_gradients(
    architecture: str, make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The MLP's chunks norm their rows themselves, and leave to attention what both halves read."""
    folder, device = make_checkpoint(architecture), ReferenceDevice()
    spent, in_row_chunks = [], model_file.in_row_chunks

    def noted(*args: Any, **options: Any) -> Any:
        spent.append(options["spent"])
        return in_row_chunks(*args, **options)

    monkeypatch.setattr(model_file, "in_row_chunks", noted)
    monkeypatch.setattr("wgrad.train.model.model.MLP_CHUNKS_ABOVE", 0)
    monkeypatch.setattr("wgrad.train.model.model.MLP_CHUNK_BYTES", 6 * 88 * 4 * 16)
    grads = []
    for chunks in (False, True):
        model, parameters = full_model(folder, device)
        model.recompute = chunks
        model.loss(make_inputs(device, *batch(300))).backward()
        grads.append(device.download(parameters.grad))
    assert 0 < distance(grads[1], grads[0]) < 1e-5
    assert spent and not any(spent)


def test_packed_documents_do_not_see_each_other(make_checkpoint: Any, device: Device) -> None:
    """A sequence of two documents gives the sum of their losses and gradients."""
    folder = make_checkpoint("MistralForCausalLM", sliding_window=6)
    ids, targets = batch(300)
    cut = 9
    targets[0, cut - 1] = -100
    parts = [(ids[:1, :cut], targets[:1, :cut]), (ids[:1, cut:], targets[:1, cut:])]
    loaded = load_oracle(folder)
    plain, true = (
        [oracle(loaded, dtype, np.ascontiguousarray(i), np.ascontiguousarray(t)) for i, t in parts]
        for dtype in (torch.float32, torch.float64)
    )
    model, parameters = full_model(folder, device)
    doc_start = np.where(np.arange(TOKENS) < cut, 0, cut).astype(np.int32)[None]
    model.loss(make_inputs(device, ids[:1], targets[:1], doc_start)).backward()
    for name, tensor in parameters.tensors.items():
        wanted = true[0][2][name] + true[1][2][name]
        limit = 3 * distance(plain[0][2][name] + plain[1][2][name], wanted)
        assert distance(device.download(tensor.gradient), wanted) <= limit, name


def test_transformers_loads_what_full_training_saved(make_checkpoint: Any, text_data: Path, tmp_path: Path) -> None:
    """It loads weights, configuration and tokenizer of --full, which started from bfloat16."""
    from wgrad.train.commands.cli import main

    folder, out = make_checkpoint("Qwen3ForCausalLM", dtype="bfloat16", tie_word_embeddings=True), tmp_path / "out"
    options = (
        f"--model {folder} --data {text_data} --out {out} --device cpu --full "
        f"--max-length 40 --max-steps 3 --learning-rate 1e-2"
    )
    assert main(["finetune", *options.split()]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert next(theirs.parameters()).dtype == torch.float32
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = np.array([tokenizer("the quick brown fox")["input_ids"]], np.int32)
    words = torch.tensor(ids).long()
    with torch.no_grad():
        before = transformers.AutoModelForCausalLM.from_pretrained(folder)(words).logits.float()
        plain = theirs(words).logits[0].double().numpy()
        true = exact_norms(theirs.double())(words).logits[0].numpy()
    assert distance(plain, before[0].double().numpy()) > 0.05
    device = ReferenceDevice()
    model, _ = full_model(out, device)
    logits = device.download(model.logits(model.hidden(make_inputs(device, ids, np.full_like(ids, -100))).data))
    assert distance(logits, true) <= 2 * distance(plain, true)


def test_the_tables_of_the_docs_are_current() -> None:
    cases = counted([CASES])
    assert all(cases.values()), [name for name, count in cases.items() if not count]
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text, cases), "run python -m tests.family_table"


def test_rope_parameters_of_either_version_agree(tmp_path: Path) -> None:
    """transformers 4 and 5 write the same scaling in different places."""
    from wgrad.train.model.load_config import parse_model_config

    base = json.loads(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 48, "num_hidden_layers": 1}))
    base |= {"num_attention_heads": 4, "vocab_size": 8, "intermediate_size": 8}
    old = parse_model_config({**base, "rope_theta": 500.0, "rope_scaling": YARN})
    new = parse_model_config({**base, "rope_parameters": {**YARN, "rope_theta": 500.0}})
    assert old.rope == new.rope and old.rope.theta == 500.0
