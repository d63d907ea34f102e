"""Rows of Gemma's families."""

from __future__ import annotations

from tests.families.common import (
    ALIKE,
    FAR_FROM_CAPS,
    GEMMA,
    GEMMA2,
    GEMMA4,
    GEMMA4_EXPERTS,
    IDS,
    NESTED_WAYS,
    SLIDES,
    VOCAB,
    of_two_kinds,
)
from tests.families.row import Reading, Row

ROWS = {
    "GemmaForCausalLM": Row(
        cases={"gemma": {"tie_word_embeddings": True, "hidden_act": "gelu", "pad_token_id": None}},
        refused={"use_bidirectional_attention": True, "hidden_act": "mish"},
        tied=True,
        norms_of_one="GemmaRMS",
        in_llama_cpp={"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
        gelu_table=True,
    ),
    "Gemma2ForCausalLM": Row(
        cases={
            "gemma2": {**GEMMA2, "head_dim": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
            "gemma2_uncapped": {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None},
        },
        in_text={"gemma2": FAR_FROM_CAPS},
        tied=True,
        eager=True,
        norms_of_one="Gemma2",
        in_llama_cpp=GEMMA,
        gelu_table=True,
        reading=Reading(ways=({"layer_types": SLIDES[::-1]},)),
    ),
    "Gemma3ForCausalLM": Row(
        cases={
            "gemma3": {
                **GEMMA2,
                "head_dim": 20,
                "sliding_window_pattern": 3,
                "rope_local_base_freq": 100.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            }
        },
        tied=True,
        norms_of_one="Gemma3RMS",
        in_llama_cpp={**GEMMA, "rope_theta": 1e6, "num_hidden_layers": 6},
        read_gguf=({"sliding_window": None},),
        gelu_table=True,
        reading=Reading(ways=({"layer_types": SLIDES, "sliding_window_pattern": 2}, *NESTED_WAYS)),
    ),
    "Gemma3nForCausalLM": Row(
        tiny={
            **IDS,
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
        cases={"gemma3n": {"final_logit_softcapping": 3.0}},
        rounded=("gemma3n",),
        refused={
            "num_kv_shared_layers": 4,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "intermediate_size": [88, 72],
            "activation_sparsity_pattern": [0.5],
            "partial_rotary_factor": 0.5,
            "hidden_size_per_layer_input": 0,
            "hidden_activation": "mish",
        },
        tied=True,
        # llama.cpp has these sizes; its deviation of a gate is that of a sample: here of many numbers.
        in_llama_cpp={
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention"] * 2,
            "num_hidden_layers": 2,
            "laurel_rank": 64,
            "altup_num_inputs": 4,
            "hidden_size_per_layer_input": 256,
            "intermediate_size": 1024,
            "activation_sparsity_pattern": [0.95] * 2,
            "final_logit_softcapping": 30.0,
            "rope_local_base_freq": 500.0,
        },
        gelu_table=True,
        in_test_all=frozenset({"cache wgpu", "gguf adapter", "peft wgpu"}),
        reading=Reading(given={"num_kv_shared_layers": 0}),
    ),
    "Gemma4ForCausalLM": Row(
        tiny={
            **GEMMA4,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 10,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
        },
        cases={
            "gemma4": {"final_logit_softcapping": 3.0, "use_double_wide_mlp": True},
            "gemma4_keys_as_values": {
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
            "gemma4_experts": {**GEMMA4_EXPERTS, "moe_intermediate_size": 36, "final_logit_softcapping": 3.0},
        },
        refused={
            "enable_moe_block": True,
            "num_kv_shared_layers": 4,
            "use_bidirectional_attention": "all",
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "global_head_dim": 513,
            "per_layer_config": {"1": {"head_dim": 16}},
            "partial_rotary_factor": 0.5,
            "hidden_activation": "mish",
        },
        unusual={"top_k_experts": [1, 5], "final_logit_softcapping": [3.0]},
        never_unusual=("hidden_act", "tie_word_embeddings"),  # always tied in transformers
        with_experts={**GEMMA4_EXPERTS, "moe_intermediate_size": 36},
        tied=True,
        in_llama_cpp={"use_double_wide_mlp": True, "final_logit_softcapping": 3.0},
        gguf_cases=(GEMMA4_EXPERTS,),
        adapted_layers={},
        gelu_table=True,
        files_of_experts=".experts.down_proj",
        in_test_all=frozenset({"cache wgpu", "merge", "peft wgpu", "cases wgpu"}),
        in_test=frozenset({"greedy gemma4"}),
        reading=Reading(
            given={"global_head_dim": 12, "hidden_size_per_layer_input": 0},
            lacks=("rope_scaling",),  # taken for rope_parameters, and fails
            head_dims=of_two_kinds,
            ways=(
                {
                    "layer_types": None,
                    "num_kv_shared_layers": 0,
                    "per_layer_config": {"2": {"head_dim": 20, "num_key_value_heads": 1}},
                },
            ),
        ),
    ),
    "Gemma4UnifiedForCausalLM": Row(
        tiny={**GEMMA4, "layer_types": ["sliding_attention", "full_attention"]},
        cases={"gemma4_unified": {}},
        refused={"hidden_size_per_layer_input": 8, "per_layer_config": {"1": {"sliding_window": 16}}},
        tied=True,
        gelu_table=True,
        in_test_all=ALIKE | {"logits cpu"},
        reading=Reading(
            given={"global_head_dim": 12, "hidden_size_per_layer_input": 0},
            lacks=("rope_scaling",),  # taken for rope_parameters, and fails
            head_dims=of_two_kinds,
        ),
    ),
    "VaultGemmaForCausalLM": Row(
        cases={"vaultgemma": {**GEMMA2, "final_logit_softcapping": 3.0}},
        in_text={"vaultgemma": FAR_FROM_CAPS},
        refused={"use_bidirectional_attention": True, "partial_rotary_factor": 0.5, "hidden_activation": "mish"},
        eager=True,
        norms_of_one="VaultGemma",
        in_test_all=ALIKE,
    ),
}
