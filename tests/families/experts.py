"""Rows of families with experts."""

from __future__ import annotations

from tests.families.common import (
    ALIKE,
    BOTH,
    CHOSEN_VALUES,
    LLAMA3,
    LONGROPE,
    ON_WGPU,
    QWEN_VALUES,
    SLIDING,
    WINDOW_VALUES,
    YARN,
    YARN_16,
    everywhere,
    slides,
    with_windows_or_dense,
    with_windows_or_none,
    write_logit_scale,
    write_yarn,
)
from tests.families.row import Reading, Row

ROWS = {
    "Llama4ForCausalLM": Row(
        tiny={"num_experts_per_tok": 1, "intermediate_size_mlp": 52, "no_rope_layers": [1, 0], "num_hidden_layers": 2},
        cases={
            "llama4": {
                "num_hidden_layers": 4,
                "no_rope_layers": None,
                "interleave_moe_layer_step": 2,
                "rope_scaling": LLAMA3,
                "rope_theta": 500.0,
            },
            "llama4_plain": {"use_qk_norm": False, "attention_bias": True},
        },
        prompts={"llama4": (3, 58, 75)},
        in_text={"llama4": {"attention_chunk_size": 64, "floor_scale": 16}},
        refused={
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.1,
            "no_rope_layers": [1],
            "layer_types": ["sliding_attention"] * 2,
        },
        unusual={"use_qk_norm": BOTH, "interleave_moe_layer_step": [2], "floor_scale": [3], "attn_scale": [0.3]},
        turned=3,
        in_llama_cpp={
            "num_hidden_layers": 4,
            "no_rope_layers": None,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 64,
        },
        adapted_layers={},  # llama.cpp ends if no layer sees all tokens
        in_test_all=ALIKE | {"cases"},
        reading=Reading(mlp_width="intermediate_size_mlp"),
    ),
    "HunYuanMoEV1ForCausalLM": Row(
        tiny={"moe_topk": 2, "moe_intermediate_size": None, "attention_dropout": 0.0},
        cases={"hunyuan_moe": {"head_dim": 20, "attention_bias": True}},
        refused={
            "moe_topk": [2, 1],
            "moe_intermediate_size": 36,
            "num_shared_expert": [2, 2],
            "use_qk_norm": False,
            "num_experts": [5, 4],
            "moe_layer_num_skipped": 1,
        },
        unusual={"moe_topk": [1, 5]},
        in_llama_cpp={"moe_intermediate_size": 96},
        files_of_experts=".experts.4.",
        in_test_all=ALIKE | {"expert files"},
        # Its MLPs have no bias.
        reading=Reading(given={"mlp_bias": False}, ways=({"num_experts_per_tok": 1, "moe_topk": 2},)),
    ),
    "HYV3ForCausalLM": Row(
        cases={
            "hy3": {
                "attention_bias": True,
                "mlp_bias": True,
                "num_shared_experts": 2,
                "mlp_layer_types": ["sparse", "dense"],
            }
        },
        refused={
            "qk_norm": False,
            "route_norm": False,
            "moe_router_use_sigmoid": False,
            "mlp_layer_types": ["dense", "conv"],
            "first_k_dense_replace": 2,
            "num_shared_experts": 0,
        },
        unusual={**CHOSEN_VALUES, "num_shared_experts": [2], "router_scaling_factor": [0.3], "mlp_bias": BOTH},
        never_unusual=("hidden_act",),
        files_of_experts=".experts.4.",
        in_test_all=ALIKE | {"expert files"},
    ),
    "FlintForCausalLM": Row(
        tiny={
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 7,
            "shared_expert_intermediate_size": 52,
            "mlp_only_layers": [1],
        },
        cases={
            "flint": {"attention_bias": True},
            "flint_softer": {
                "num_hidden_layers": 7,
                "layer_types": None,
                "mlp_only_layers": None,
                "norm_topk_prob": False,
            },
        },
        refused={"layer_types": ["conv"] * 2, "sliding_window": None, "num_experts_per_tok": 6},
        may_have_no_experts=True,
        unusual={**CHOSEN_VALUES, "norm_topk_prob": BOTH, "shared_expert_intermediate_size": [17]},
        eager=True,
        files_of_experts=".experts.4.",
        balanced={},
        in_test_all=ALIKE | {"balance", "expert files", "cases"},
        reading=Reading(rotates=slides),
    ),
    "Kolibri1ForCausalLM": Row(
        tiny={
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 7,
            "shared_expert_intermediate_size": 52,
            "mlp_only_layers": [1],
        },
        cases={
            "kolibri1": {"num_hidden_layers": 6, "layer_types": None},
            "kolibri1_normalized": {"norm_topk_prob": True},
        },
        refused={"layer_types": ["conv"] * 2, "sliding_window": None, "num_experts_per_tok": 6},
        unusual={**CHOSEN_VALUES, "norm_topk_prob": BOTH, "shared_expert_intermediate_size": [17]},
        files_of_experts=".experts.4.",
        in_test_all=ALIKE | {"cases"},
        reading=Reading(mlp_width="moe_intermediate_size", rotates=with_windows_or_none),
    ),
    "LagunaForCausalLM": Row(
        tiny={
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 7,
            "num_attention_heads_per_layer": [4, 6],
            "shared_expert_intermediate_size": 52,
            "moe_routed_scaling_factor": 1.5,
            "rope_theta": None,
        },
        cases={
            "laguna": {
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
                "gating": "per-element",
                "mlp_layer_types": ["sparse", "dense"],
                "num_attention_heads_per_layer": None,
            },
        },
        refused={
            "gating": "per-layer",
            "gating_types": ["per-head", "per-element"],
            "num_attention_heads_per_layer": [4, 5],
            "mlp_only_layers": [1],
            "moe_router_logit_softcapping": 30.0,
            "moe_apply_router_weight_on_input": True,
            "norm_topk_prob": False,
            "swa_attention_sink_enabled": True,
            "mlp_layer_types": ["dense"],
        },
        unusual={"num_experts_per_tok": [1, 5], "gating": ["per-element"], "moe_routed_scaling_factor": [0.3]},
        in_llama_cpp={
            "num_hidden_layers": 3,
            "layer_types": ["full_attention"] + ["sliding_attention"] * 2,
            "num_attention_heads_per_layer": [4, 6, 2],
            "rope_parameters": {
                "full_attention": YARN_16 | {"rope_theta": 9000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": SLIDING,
            },
        },
        gguf_cases=(
            {
                "layer_types": ["full_attention"] * 3,
                "num_attention_heads_per_layer": None,
                "gating": "per-element",
            },
        ),
        adapted_layers={},
        files_of_experts=".experts.4.",
        balanced={},
        gguf_keys=write_yarn,
        in_test_all=ALIKE | {"balance", "expert files", "cases"},
        in_test=frozenset({"greedy laguna"}),
        reading=Reading(lacks=("rope_scaling",)),  # taken for rope_parameters, and fails
    ),
    "Cohere2MoeForCausalLM": Row(
        tiny={
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 7,
            "num_shared_experts": 2,
            "rms_norm_eps": None,
        },
        cases={
            "cohere2_moe": {
                "logit_scale": 0.3,
                "prefix_dense_intermediate_size": 52,
                "mlp_layer_types": ["sparse", "dense"],
            },
            "cohere2_moe_sigmoid": {
                "logit_scale": 0.3,
                "expert_selection_fn": "sigmoid",
                "rms_norm_eps": 1e-5,
                "shared_expert_combination_strategy": "sum",
            },
        },
        refused={
            "expert_selection_fn": "top",
            "shared_expert_combination_strategy": "max",
            "mlp_layer_types": ["dense"],
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
        unusual={
            "num_experts_per_tok": [1, 5],
            "num_shared_experts": [0, 2],
            "expert_selection_fn": ["softmax", "sigmoid"],
            "shared_expert_combination_strategy": ["average", "sum"],
            "norm_topk_prob": BOTH,
            "logit_scale": [0.3],
            "mlp_layer_types": [["dense", "sparse"]],
        },
        in_llama_cpp={"num_hidden_layers": 3, "layer_types": None, "tie_word_embeddings": True},
        gguf_cases=(
            {
                "rms_norm_eps": 1e-3,
                "expert_selection_fn": "sigmoid",
                "first_k_dense_replace": 1,
                "prefix_dense_intermediate_size": 40,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
        ),
        files_of_experts=".experts.4.",
        gguf_keys=write_logit_scale,
        in_test_all=ALIKE | {"expert files", "cases"},
        reading=Reading(rotates=with_windows_or_dense),
    ),
    "MiniMaxM2ForCausalLM": Row(
        cases={"minimax_m2": {"rotary_dim": 6}},
        refused={"scoring_func": "softmax", "use_qk_norm": False, "shared_intermediate_size": 8},
        unusual={"num_experts_per_tok": [1, 5], "rotary_dim": [4, 12]},
        balanced={},
        in_test_all=frozenset({"balance cpu", "gguf adapter", "gguf merge"}),
    ),
    "MixtralForCausalLM": Row(
        cases={"mixtral": {"sliding_window": 7, "hidden_act": "relu2"}},
        unusual={**CHOSEN_VALUES, "sliding_window": [1, 5]},
        files_of_experts=".experts.4.",
        balanced={},
        paired=True,
        in_test_all=frozenset({"balance wgpu"}),
        reading=Reading(o_bias=False, windows=everywhere),
    ),
    "FlexOlmoForCausalLM": Row(
        cases={"flex_olmo": {}},
        refused={"num_experts_per_tok": 6, "clip_qkv": 8.0},
        unusual={**CHOSEN_VALUES, "norm_topk_prob": BOTH},
        files_of_experts=".experts.4.",
        in_test_all=ALIKE | {"expert files"},
    ),
    "OlmoeForCausalLM": Row(
        cases={"olmoe": {"num_experts": 7, "num_experts_per_tok": 3, "clip_qkv": 0.7}},
        unusual={**CHOSEN_VALUES, "norm_topk_prob": BOTH},
        in_llama_cpp={"num_key_value_heads": 4},
        files_of_experts=".experts.4.",
        balanced={},
        in_test_all=ON_WGPU | {"balance wgpu"},
    ),
    "GptOssForCausalLM": Row(
        tiny={
            "rope_theta": 3.0,  # llama.cpp rounds yarn's range to the same with it: all pairs
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
            "sliding_window": 7,
        },
        cases={
            "gpt_oss": {
                "num_hidden_layers": 3,
                "num_experts": 7,
                "num_local_experts": 7,
                "num_experts_per_tok": 3,
                "head_dim": 20,
                "swiglu_limit": 0.6,
                "swiglu_alpha": 1.3,
                "rope_theta": 500.0,
            }
        },
        unusual={**WINDOW_VALUES, "num_experts_per_tok": [1, 5], "swiglu_limit": [0.6, 2.0], "swiglu_alpha": [1.3]},
        never_unusual=("hidden_act",),
        eager=True,
        turned=3,
        files_of_experts=".experts.down_proj",
        balanced={},
        gguf_keys=write_yarn,
        in_test_all=frozenset({"cache wgpu", "merge", "peft wgpu"}),
        in_test=frozenset({"float64 gpt_oss"}),
    ),
    "Qwen2MoeForCausalLM": Row(
        tiny={"shared_expert_intermediate_size": 52},
        cases={"qwen2_moe": {"use_sliding_window": True, "sliding_window": 7, "hidden_act": "gelu"}},
        may_have_no_experts=True,
        unusual={**QWEN_VALUES, "use_sliding_window": [True], "sliding_window": [1, 5], "qkv_bias": [False]},
        adapted_mlps=True,
        in_test_all=frozenset({"gguf adapter", "gguf merge"}),
        reading=Reading(ways=({"num_local_experts": 7},)),
    ),
    "Qwen3MoeForCausalLM": Row(
        cases={"qwen3_moe": {"norm_topk_prob": True, "num_hidden_layers": 3, "mlp_only_layers": [1], "head_dim": 20}},
        may_have_no_experts=True,
        unusual={**QWEN_VALUES, "use_sliding_window": [True], "sliding_window": [1, 5]},
        in_llama_cpp={"norm_topk_prob": True, "moe_intermediate_size": 32},
        files_of_experts=".experts.4.",
        balanced={"norm_topk_prob": True, "num_hidden_layers": 3, "mlp_only_layers": [1]},
        in_test_all=frozenset({"balance wgpu"}),
        reading=Reading(windows=everywhere),
    ),
    "MellumForCausalLM": Row(
        tiny={"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"], "rope_theta": None},
        cases={
            "mellum": {
                "num_hidden_layers": 3,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "mlp_layer_types": ["sparse", "dense", "sparse"],
                "rope_parameters": {
                    "full_attention": {**YARN, "rope_theta": 500.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
                },
            }
        },
        refused={"mlp_layer_types": ["dense", "conv"], "layer_types": ["conv"] * 2, "num_mtp_layers": 2},
        unusual={**WINDOW_VALUES, **CHOSEN_VALUES, "norm_topk_prob": BOTH, "mlp_layer_types": [["sparse", "dense"]]},
        in_llama_cpp={
            "rope_parameters": {"full_attention": YARN_16 | {"rope_theta": 500.0}, "sliding_attention": SLIDING}
        },
        gguf_keys=write_yarn,
        in_test_all=ALIKE,
        reading=Reading(lacks=("rope_scaling",)),  # taken for rope_parameters, and fails
    ),
    "PhimoeForCausalLM": Row(
        tiny={"router_jitter_noise": 0.2},
        cases={
            "phimoe": {
                "attention_bias": True,
                "lm_head_bias": True,
                "sliding_window": 9,
                "rope_scaling": {
                    **LONGROPE,
                    "original_max_position_embeddings": 32,
                    "short_mscale": 1.3,
                    "long_mscale": 1.3,
                },
            }
        },
        refused={
            "num_experts_per_tok": 3,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 6,
                "long_factor": [1.0] * 6,
                "short_mscale": 1.2,
            },
        },
        unusual={"router_jitter_noise": [0.0, 1.0], "lm_head_bias": BOTH, "sliding_window": [5]},
        files_of_experts=".experts.4.",
        in_test_all=frozenset({"cache wgpu", "peft wgpu"}),
        reading=Reading(windows=everywhere),
    ),
}
