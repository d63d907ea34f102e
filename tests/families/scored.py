"""Rows of families with DeepSeek's router or latent attention."""

from __future__ import annotations

from tests.families.common import (
    ALIKE,
    BOTH,
    CHOSEN_VALUES,
    GROUPS_OF_EXPERTS,
    LATENT,
    LATENT_VALUES,
    ON_WGPU,
    SCORED_VALUES,
    WINDOW_VALUES,
    YARN,
    YARN_OF_LATENTS,
    slides,
    with_width_of_keys,
    with_windows_if_any,
)
from tests.families.row import Reading, Row

ROWS = {
    "Glm4MoeForCausalLM": Row(
        tiny=GROUPS_OF_EXPERTS,
        cases={"glm4_moe": {"use_qk_norm": True, "attention_bias": True}},
        refused={"n_group": 4, "topk_group": 4, "kv_lora_rank": 8},
        unusual={**SCORED_VALUES, "use_qk_norm": BOTH, "norm_topk_prob": BOTH, "partial_rotary_factor": [1.0]},
        in_llama_cpp={"num_nextn_predict_layers": 0, "use_qk_norm": True},
        in_test_all=ALIKE,
        reading=Reading(o_bias=False, ways=({"num_local_experts": 9},)),
    ),
    "SolarOpenForCausalLM": Row(
        tiny=GROUPS_OF_EXPERTS,
        cases={"solar_open": {"attention_bias": True, "norm_topk_prob": False}},
        unusual={**SCORED_VALUES, "norm_topk_prob": BOTH},
        read_as="Glm4MoeForCausalLM",
        in_test_all=ALIKE - {"logits wgpu"},
        reading=Reading(mlp_width="moe_intermediate_size", o_bias=False),
    ),
    "Dots1ForCausalLM": Row(
        tiny=GROUPS_OF_EXPERTS,
        cases={
            "dots1": {
                "norm_topk_prob": False,
                "n_group": 1,
                "topk_group": 1,
                "sliding_window": 7,
                "max_window_layers": 1,
            }
        },
        refused={"n_group": 2.5, "layer_types": ["conv"] * 2, "topk_group": 5},
        unusual={**SCORED_VALUES, "norm_topk_prob": BOTH, "sliding_window": [5], "max_window_layers": [0, 1]},
        in_llama_cpp={"num_key_value_heads": 4, "norm_topk_prob": True},
        in_test_all=ALIKE,
    ),
    "ExaoneMoeForCausalLM": Row(
        tiny={
            "num_experts": 5,
            "n_group": 1,
            "topk_group": 1,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        cases={"exaone_moe": {"num_shared_experts": 2, "num_experts": 6, "n_group": 3, "topk_group": 2}},
        refused={"mlp_layer_types": ["dense", "conv"], "n_group": 4, "layer_types": ["conv"] * 2},
        unusual={**WINDOW_VALUES, "num_experts_per_tok": [1, 5], "num_shared_experts": [1, 2], "norm_topk_prob": BOTH},
        in_llama_cpp={"num_hidden_layers": 4, "layer_types": None},
        files_of_experts=".experts.4.",
        in_test_all=ALIKE - {"logits wgpu"} | {"expert files"},
        reading=Reading(rotates=with_windows_if_any),
    ),
    "AfmoeForCausalLM": Row(
        tiny={
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 7,
            "num_dense_layers": 1,
            "route_scale": 1.5,
        },
        cases={"afmoe": {"mup_enabled": True}},
        refused={"score_func": "softmax", "route_norm": False, "n_group": 2, "layer_types": ["conv"] * 2},
        unusual={
            **WINDOW_VALUES,
            **CHOSEN_VALUES,
            "num_shared_experts": [2],
            "mup_enabled": BOTH,
            "num_dense_layers": [0, 1],
        },
        in_llama_cpp={"num_hidden_layers": 4, "layer_types": None, "mup_enabled": True},
        files_of_experts=".experts.4.",
        in_test_all=ON_WGPU | {"expert files"},
        reading=Reading(rotates=slides),
    ),
    "Ernie4_5_MoeForCausalLM": Row(
        tiny={"moe_num_experts": 5, "moe_k": 2},
        cases={"ernie4_5_moe": {"use_bias": True, "tie_word_embeddings": False}},
        refused={"moe_norm_min": 0.1, "moe_gate": "top2", "moe_layer_interval": 0},
        unusual={**CHOSEN_VALUES, "use_bias": BOTH, "moe_num_shared_experts": [0, 1], "moe_layer_start_index": [0]},
        balanced={"moe_layer_start_index": 0},
        in_test_all=ALIKE,
        reading=Reading(ways=({"num_experts_per_tok": 1, "moe_k": 2, "num_experts": 7},)),
    ),
    "DeepseekV2ForCausalLM": Row(
        tiny={**LATENT, **GROUPS_OF_EXPERTS},
        cases={
            "deepseek_v2": {
                "topk_method": "group_limited_greedy",
                "attention_bias": True,
                "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
            },
            "deepseek_v2_lite": {
                "q_lora_rank": None,
                "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
            },
        },
        rounded=("deepseek_v2", "deepseek_v2_lite"),
        refused={
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "moe_layer_freq": 2,
            "topk_method": "noaux_tc",
            "num_key_value_heads": 2,
            "v_head_dim": 17,
            "qk_rope_head_dim": 5,
            "partial_rotary_factor": 0.5,
        },
        unusual={
            **LATENT_VALUES,
            "kv_lora_rank": [8],
            "topk_method": ["greedy", "group_limited_greedy"],
            "mlp_bias": BOTH,
        },
        in_llama_cpp={"topk_method": "greedy", **YARN_OF_LATENTS},
        merged_gguf=({"q_lora_rank": None, "num_hidden_layers": 27},),  # as llama.cpp knows V2-Lite
        in_test_all=ON_WGPU | {"gguf merge", "cases"},
        reading=Reading(
            given={"num_key_value_heads": 32, "num_experts_per_tok": 8}, lacks=("head_dim",), ways=({"num_experts": 9},)
        ),
    ),
    "DeepseekV3ForCausalLM": Row(
        tiny={**LATENT, **GROUPS_OF_EXPERTS},
        cases={
            "deepseek_v3": {
                "attention_bias": True,
                "norm_topk_prob": True,
                "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            },
            "deepseek_v3_halves": {
                "q_lora_rank": None,
                "rope_interleave": False,
                "v_head_dim": 16,
                "first_k_dense_replace": 0,
            },
        },
        refused={
            "scoring_func": "softmax",
            "topk_method": "greedy",
            "moe_layer_freq": 2,
            "n_group": 4,
            "topk_group": 4,
            "num_key_value_heads": 2,
            "v_head_dim": 17,
            "partial_rotary_factor": 0.5,
        },
        unusual={**LATENT_VALUES, "rope_interleave": BOTH, "norm_topk_prob": BOTH},
        in_llama_cpp={"num_nextn_predict_layers": 0, **YARN_OF_LATENTS},
        in_test_all=ALIKE | {"logits cpu"},
        in_test=frozenset({"greedy deepseek_v3"}),
        reading=Reading(
            given={"num_key_value_heads": 32, "num_experts_per_tok": 8},
            lacks=("head_dim",),
            fails=("num_attention_heads",),
        ),
    ),
    "AXK1ForCausalLM": Row(
        tiny={**LATENT, **GROUPS_OF_EXPERTS},
        cases={
            "axk1": {
                "num_hidden_layers": 3,
                "mlp_layer_types": ["sparse", "dense", "sparse"],
                "attention_bias": True,
                "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            }
        },
        refused={
            "scoring_func": "softmax",
            "moe_layer_freq": 0,
            "q_lora_rank": None,
            "mlp_layer_types": ["dense"],
            "num_key_value_heads": 2,
            "v_head_dim": 17,
            "partial_rotary_factor": 0.5,
        },
        unusual={
            **{key: values for key, values in LATENT_VALUES.items() if key != "q_lora_rank"},
            "rope_interleave": BOTH,
            "norm_topk_prob": BOTH,
            "moe_layer_freq": [1, 2],
        },
        files_of_experts=".experts.4.",
        in_test_all=ALIKE | {"expert files"},
        reading=Reading(
            given={"num_key_value_heads": 32, "num_experts_per_tok": 8},
            lacks=("head_dim",),
            fails=("num_attention_heads",),
        ),
    ),
    "Glm4MoeLiteForCausalLM": Row(
        tiny={**LATENT, **GROUPS_OF_EXPERTS},
        cases={
            "glm4_moe_lite": {
                "num_hidden_layers": 3,
                "mlp_layer_types": ["sparse", "dense", "sparse"],
                "v_head_dim": 16,
            }
        },
        refused={
            "scoring_func": "softmax",
            "mlp_layer_types": ["dense"],
            "first_k_dense_replace": 2,
            "topk_group": 4,
            "num_key_value_heads": 2,
            "v_head_dim": 17,
            "partial_rotary_factor": 0.5,
        },
        unusual={**LATENT_VALUES, "first_k_dense_replace": [1], "mlp_layer_types": [["sparse", "dense"]]},
        read_as="DeepseekV3ForCausalLM",
        in_test_all=ALIKE | {"logits cpu"},
        reading=Reading(given={"num_key_value_heads": 32, "num_experts_per_tok": 8}, lacks=("head_dim",)),
    ),
    "Mistral4ForCausalLM": Row(
        tiny={**LATENT, **GROUPS_OF_EXPERTS},
        finish=with_width_of_keys,
        cases={
            "mistral4": {
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
                "q_lora_rank": None,
                "norm_topk_prob": False,
                "first_k_dense_replace": 0,
                "rope_interleave": False,
                "rope_parameters": {**YARN, "rope_theta": 500.0, "llama_4_scaling_beta": 0.0},
            },
        },
        refused={
            "num_key_value_heads": 2,
            "v_head_dim": 17,
            "topk_group": 4,
            "head_dim": 12,
            "kv_lora_rank": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 9.0, "partial_rotary_factor": 0.5},
        },
        unusual={**LATENT_VALUES, "rope_interleave": BOTH, "norm_topk_prob": BOTH},
        in_llama_cpp={
            "rope_theta": None,
            "rope_parameters": YARN_OF_LATENTS["rope_scaling"]
            | dict.fromkeys(("mscale", "mscale_all_dim"), 1.0)
            | {"rope_theta": 500.0, "original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.4},
        },
        in_test_all=ALIKE,
        reading=Reading(given={"num_key_value_heads": 32, "num_experts_per_tok": 8}, lacks=("head_dim",)),
    ),
    "MiniCPM3ForCausalLM": Row(
        tiny=LATENT,
        cases={
            "minicpm3": {
                "v_head_dim": None,
                "scale_emb": 3.0,
                "scale_depth": 0.9,
                "dim_model_base": 17,
                "rope_scaling": {"rope_type": "longrope", "short_factor": [1.1] * 3, "long_factor": [1.5, 2.0, 3.0]},
                "original_max_position_embeddings": 16,
            }
        },
        refused={"num_key_value_heads": 2, "v_head_dim": 17, "num_experts": 8, "clip_qkv": 8.0},
        in_llama_cpp={"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
        in_test_all=ALIKE | {"logits cpu"},
        in_test=frozenset({"float64 minicpm3"}),
        reading=Reading(given={"num_key_value_heads": 32, "num_experts_per_tok": 8}, lacks=("head_dim",)),
    ),
    "YoutuForCausalLM": Row(
        tiny=LATENT,
        cases={"youtu": {"attention_bias": True}},
        refused={"num_key_value_heads": 2, "v_head_dim": 17, "num_experts": 8},
        in_test_all=ALIKE,
        reading=Reading(
            given={"num_key_value_heads": 32, "num_experts_per_tok": 8},
            lacks=("head_dim",),
            fails=("num_key_value_heads",),
        ),
    ),
}
