"""Rows of families with gated DeltaNet or short convolutions."""

from __future__ import annotations

from tests.families.common import (
    ALIKE,
    BOTH,
    CHOSEN_VALUES,
    IDS,
    ON_WGPU,
    QWEN_VALUES,
    SIXTEEN,
)
from tests.families.row import Reading, Row

ROWS = {
    "Qwen3NextForCausalLM": Row(
        tiny={
            **IDS,
            "head_dim": 20,
            "partial_rotary_factor": 0.4,
            "full_attention_interval": 2,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 10,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "shared_expert_intermediate_size": 52,
        },
        cases={
            "qwen3_next": {
                "num_hidden_layers": 3,
                "full_attention_interval": 3,
                "linear_num_value_heads": 6,
                "mlp_only_layers": [1],
            }
        },
        refused={"attn_output_gate": False, "use_sliding_window": True, "layer_types": ["conv"] * 2},
        may_have_no_experts=True,
        unusual=QWEN_VALUES,
        never_unusual=("hidden_act",),
        norms_of_one="Qwen3Next",
        in_llama_cpp={"linear_num_value_heads": 6, **SIXTEEN, "partial_rotary_factor": 0.5},
        in_test_all=ON_WGPU | {"gguf merge"},
        reading=Reading(
            given={
                "partial_rotary_factor": 0.5,
                "head_dim": 12,
                "full_attention_interval": 4,
                "use_sliding_window": False,
            }
        ),
    ),
    "Qwen3_5ForCausalLM": Row(
        tiny={
            **IDS,
            "head_dim": 20,
            "partial_rotary_factor": 0.4,
            "full_attention_interval": 2,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 10,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        cases={
            "qwen3_5": {
                "num_hidden_layers": 3,
                "full_attention_interval": 3,
                "attention_bias": True,
                "linear_num_value_heads": 2,
                "linear_conv_kernel_dim": 3,
            }
        },
        norms_of_one="Qwen3_5",
        in_llama_cpp={"linear_num_value_heads": 6, **SIXTEEN, "partial_rotary_factor": 0.5},
        never_unusual=("hidden_act",),
        in_test_all=frozenset({"gguf merge"}),
        in_test=frozenset({"greedy qwen3_5", "float64 qwen3_5"}),
        reading=Reading(given={"partial_rotary_factor": 0.5, "head_dim": 12, "full_attention_interval": 4}),
    ),
    "Qwen3_5MoeForCausalLM": Row(
        tiny={
            **IDS,
            "head_dim": 20,
            "partial_rotary_factor": 0.4,
            "full_attention_interval": 2,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 10,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "shared_expert_intermediate_size": 52,
        },
        cases={"qwen3_5_moe": {"linear_num_value_heads": 2}},
        refused={"norm_topk_prob": False, "mlp_only_layers": [0], "decoder_sparse_step": 2},
        may_have_no_experts=True,
        unusual={**CHOSEN_VALUES, "shared_expert_intermediate_size": [17]},
        never_unusual=("hidden_act",),
        in_llama_cpp={"linear_num_value_heads": 6, **SIXTEEN, "partial_rotary_factor": 0.5},
        in_test_all=ALIKE,
        reading=Reading(
            given={
                "partial_rotary_factor": 0.5,
                "head_dim": 12,
                "full_attention_interval": 4,
                "use_sliding_window": False,
            },
            mlp_width="moe_intermediate_size",
        ),
    ),
    "OlmoHybridForCausalLM": Row(
        tiny={
            **IDS,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 10,
            "linear_num_key_heads": 2,
        },
        cases={
            "olmo_hybrid": {"attention_bias": True, "linear_conv_kernel_dim": 3},
            "olmo_hybrid_positive": {
                "rope_parameters": {"rope_type": "default", "rope_theta": None},
                "linear_allow_neg_eigval": False,
            },
        },
        refused={"layer_types": ["full_attention"] * 2, "linear_key_head_dim": 512, "clip_qkv": 8.0},
        files_of_experts=".v_conv1d.",
        never_unusual=("hidden_act",),
        renamed=True,  # norms of its other layers, too
        in_test_all=ON_WGPU,
    ),
    "Lfm2ForCausalLM": Row(
        tiny={**IDS, "layer_types": ["conv", "full_attention"]},
        cases={
            "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 10}
        },
        refused={"conv_bias": True, "layer_types": ["conv", "mamba"], "num_experts": 8},
        in_llama_cpp={"norm_eps": 1e-3},
        # The width of the MLP is another otherwise.
        reading=Reading(given={"block_auto_adjust_ff_dim": False}, epsilon="norm_eps", o_bias=False),
    ),
    "Lfm2MoeForCausalLM": Row(
        tiny={"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "routed_scaling_factor": 1.5},
        cases={
            "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]},
            "lfm2_moe_without_bias": {"use_expert_bias": False, "norm_topk_prob": False},
        },
        refused={"conv_bias": True, "layer_types": None, "num_experts_per_tok": 6},
        unusual={**CHOSEN_VALUES, "use_expert_bias": BOTH, "norm_topk_prob": BOTH, "conv_L_cache": [2, 4]},
        in_llama_cpp={"norm_eps": 1e-3, "routed_scaling_factor": 1.0, "tie_word_embeddings": True},
        files_of_experts=".experts.4.",
        in_test_all=ON_WGPU | {"cases"},
        reading=Reading(
            given={"layer_types": ["conv", "full_attention"] * 3}, epsilon="norm_eps", fails=("layer_types",)
        ),
    ),
    "Lfm3ForCausalLM": Row(
        tiny={
            **IDS,
            "norm_eps": 1e-5,
            "sliding_window": 7,
            "layer_types": ["conv", "sliding_attention", "full_attention"],
            "num_hidden_layers": 3,
            "rope_theta": None,
        },
        cases={
            "lfm3": {
                "attention_bias": True,
                "rope_parameters": {
                    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.4, "rope_theta": 500.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
                },
            },
            "lfm3_plain": {"use_sandwich_norm": False, "use_attention_gate": False},
        },
        refused={"conv_bias": True, "layer_types": ["conv", "mamba", "conv"], "sliding_window": None},
        in_test_all=frozenset({"peft wgpu", "cases"}),
        reading=Reading(fails_of_null=("rms_norm_eps", "sliding_window")),
    ),
}
