"""Rows of dense families near Llama."""

from __future__ import annotations

from tests.families.common import (
    ALIKE,
    FLAT,
    IDS,
    LINEAR_3,
    LLAMA3,
    LLAMA3_64,
    LLAMA3_8192,
    LLAMA3_ALONE,
    LONGROPE,
    LONGROPE_OF_16,
    LONGROPE_OF_PART,
    NESTED_WAYS,
    OLDER,
    ON_WGPU,
    SLIDES,
    YARN,
    YARN_16,
    everywhere,
    with_windows_if_any,
    without_windows,
    write_yarn_and_growth,
)
from tests.families.row import Reading, Row

ROWS = {
    "LlamaForCausalLM": Row(
        cases={
            "llama": {},
            "llama_tied": {"tie_word_embeddings": True},
            "llama_biases": {"attention_bias": True, "mlp_bias": True},
            "llama_gelu": {"hidden_act": "gelu_pytorch_tanh"},
            "llama_linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "hidden_act": "gelu"},
            "llama_llama3": {"rope_scaling": LLAMA3, "head_dim": 24},
            "llama_yarn": {"rope_scaling": YARN, "head_dim": 24, "hidden_act": "quick_gelu"},
            "llama_yarn_factor": {
                "rope_parameters": {**YARN, "attention_factor": 1.3, "rope_theta": 500.0},
                "head_dim": 24,
            },
        },
        refused={"clip_qkv": 8.0, "num_experts": 4, "final_logit_softcapping": 30.0, "q_lora_rank": 8},
        read_gguf=(
            {"rope_scaling": LLAMA3_8192, "rope_theta": 500_000.0},
            {"rope_scaling": LLAMA3, "rope_theta": 500_000.0},
            {"rope_scaling": LINEAR_3, "rope_theta": 500_000.0},
            {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        ),
        merged_gguf=({"rope_scaling": LLAMA3_64}, {"rope_scaling": LINEAR_3 | {"rope_theta": 10000.0}}),
        paired=True,
        reading=Reading(
            ways=(
                {"rope_scaling": {}, "rope_parameters": FLAT},
                {"rope_scaling": OLDER, "rope_parameters": FLAT},
                {"rope_scaling": LLAMA3_ALONE, "original_max_position_embeddings": 16},
                {"layer_types": SLIDES, "sliding_window": 5},
            )
        ),
    ),
    "MistralForCausalLM": Row(
        tiny={"sliding_window": None},
        cases={"mistral": {"sliding_window": 7}, "mistral_full": {}},
        paired=True,
        in_test=frozenset({"greedy mistral"}),
        reading=Reading(o_bias=False, windows=everywhere, ways=({"layer_types": SLIDES},)),
    ),
    "MinistralForCausalLM": Row(
        tiny={"sliding_window": 64},  # transformers requires one even if no layer uses it
        finish=without_windows,
        cases={"ministral": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}},
        paired=True,
        in_test_all=ALIKE,
        reading=Reading(o_bias=False, ways=({"layer_types": ["attention", *SLIDES[1:]]}, {})),
    ),
    "Qwen2ForCausalLM": Row(
        cases={"qwen2": {}, "qwen2_sliding": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}},
        reading=Reading(
            o_bias=False, ways=({"layer_types": SLIDES, "use_sliding_window": True, "max_window_layers": 0},)
        ),
    ),
    "Qwen3ForCausalLM": Row(
        cases={"qwen3": {"head_dim": 20}}, reading=Reading(ways=({"layer_types": SLIDES, "use_sliding_window": True},))
    ),
    "SmolLM3ForCausalLM": Row(
        tiny=IDS,
        cases={"smollm3": {"num_hidden_layers": 4, "tie_word_embeddings": True}},
        paired=True,
        in_cache={"num_hidden_layers": 4},
        reading=Reading(
            ways=(
                {"layer_types": SLIDES, "no_rope_layers": [1, 0, 1]},
                {"layer_types": SLIDES, "use_sliding_window": False},
                {"use_sliding_window": True, "no_rope_layers": [0, 1, 0]},
            )
        ),
    ),
    "Olmo2ForCausalLM": Row(tiny=IDS, cases={"olmo2": {"head_dim": 16}}, in_test_all=ON_WGPU),
    "Olmo3ForCausalLM": Row(
        tiny=IDS,
        cases={"olmo3": {"num_hidden_layers": 4, "sliding_window": 7, "rope_scaling": YARN}},
        in_llama_cpp={"rope_theta": 5e5, "sliding_window": 7, "num_hidden_layers": 4},
        gguf_cases=({"rope_scaling": YARN_16},),
        in_test_all=ON_WGPU,
        reading=Reading(ways=({"layer_types": SLIDES}, *NESTED_WAYS)),
    ),
    "Phi3ForCausalLM": Row(
        tiny=IDS,
        cases={
            "phi3": {"sliding_window": 9},
            "phi3_longrope": {"rope_scaling": LONGROPE, "original_max_position_embeddings": 16},
            "phi3_partial": {
                "partial_rotary_factor": 0.5,
                "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.5, 2.0, 3.0]},
                "original_max_position_embeddings": 16,
            },
            "phi3_shortrope": {
                "rope_scaling": {**LONGROPE, "rope_type": "su", "original_max_position_embeddings": 128}
            },
        },
        read_gguf=(LONGROPE_OF_16 | {"tie_word_embeddings": True},),
        merged_gguf=(LONGROPE_OF_PART,),
        scaling={"rope_type": "longrope"},
        in_test=frozenset({"float64 phi3_longrope"}),
        reading=Reading(o_bias=False, windows=everywhere),
    ),
    "Ministral3ForCausalLM": Row(
        tiny=IDS,
        cases={
            "ministral3": {
                "rope_parameters": {
                    **YARN,
                    "original_max_position_embeddings": 7,
                    "llama_4_scaling_beta": 0.4,
                    "rope_theta": 500.0,
                },
                "original_max_position_embeddings": 5,  # counts before that of rope_parameters
                "sliding_window": 17,
            }
        },
        rounded=("ministral3",),
        refused={"attn_logit_softcapping": 5.0, "position_embedding_type": "nope"},
        in_llama_cpp={
            "rope_theta": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 7,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.4,
            },
        },
        paired=True,
        gguf_keys=write_yarn_and_growth,
        scaling={"rope_type": "yarn", "llama_4_scaling_beta": 0.4},
        in_test_all=ALIKE,
        reading=Reading(o_bias=False, windows=everywhere),
    ),
    "CwmForCausalLM": Row(
        tiny={**IDS, "bos_token_id": 1},
        cases={"cwm": {"num_hidden_layers": 3, "sliding_window": 7, "rope_scaling": LLAMA3}},
        refused={"layer_types": ["chunked_attention"] * 2, "partial_rotary_factor": 0.5},
        in_test_all=ALIKE,
        reading=Reading(o_bias=False),
    ),
    "SeedOssForCausalLM": Row(
        # transformers creates the model in training mode.
        tiny={**IDS, "attention_dropout": 0.0, "residual_dropout": 0.0},
        cases={
            "seed_oss": {"head_dim": 20, "mlp_bias": True},
            "seed_oss_out_bias": {"attention_bias": False, "attention_out_bias": True},
        },
        refused={"clip_qkv": 8.0, "hidden_act": "xielu"},
        in_test_all=ALIKE | {"cases"},
        reading=Reading(o_bias="attention_out_bias"),
    ),
    "Exaone4ForCausalLM": Row(
        cases={
            "exaone4": {"num_hidden_layers": 4, "sliding_window": 7},
            "exaone4_full": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
        },
        refused={"sliding_window_pattern": "LLLG", "num_experts": 8},
        in_llama_cpp={"sliding_window": None, "sliding_window_pattern": None},
        in_test_all=ALIKE | {"cases"},
        # Without a window its pattern is 0.
        reading=Reading(o_bias=False, rotates=with_windows_if_any, divides_by_zero=("sliding_window",)),
    ),
    "Ernie4_5ForCausalLM": Row(
        tiny=IDS,
        cases={"ernie4_5": {"head_dim": 20, "use_bias": True}},
        refused={"moe_num_experts": 64, "use_qk_norm": True, "hidden_act": "mish"},
        in_test_all=ALIKE - {"logits wgpu"},
        reading=Reading(o_bias="use_bias", mlp_bias="use_bias"),
    ),
    "HeliumForCausalLM": Row(
        cases={"helium": {"attention_bias": True}},
        refused={"partial_rotary_factor": 0.5, "clip_qkv": 1.0},
        paired=True,
        in_test_all=frozenset({"gguf adapter", "gguf merge", "logits wgpu", "merge", "peft wgpu"}),
        reading=Reading(o_bias=False),
    ),
    "InternLM3ForCausalLM": Row(
        cases={"internlm3": {"bias": True, "qkv_bias": True}},
        refused={"bias": True, "attention_bias": True, "num_experts": 8},
        paired=True,
        in_test_all=ALIKE,
    ),
    "IQuestCoderForCausalLM": Row(
        cases={"iquestcoder": {}},
        refused={"clip_qkv": 8.0, "use_sliding_window": True},
        paired=True,
        in_test_all=ALIKE,
        reading=Reading(given={"use_sliding_window": False}),
    ),
    "HunYuanDenseV1ForCausalLM": Row(
        tiny=IDS,
        cases={
            "hunyuan": {"head_dim": 20, "attention_bias": True},
            "hunyuan_alpha": {"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "mscale": 1.0}},
        },
        refused={"use_qk_norm": False, "mlp_bias": True, "num_experts": 16},
        in_test_all=ON_WGPU | {"gguf adapter", "gguf alone", "gguf merge", "merge"},
        reading=Reading(given={"mlp_bias": False}),  # its MLPs have none
    ),
    "GlmForCausalLM": Row(
        tiny=IDS,
        cases={"glm": {"hidden_act": "relu"}},
        refused={"use_qk_norm": True, "n_routed_experts": 8},
        in_test_all=frozenset({"cache wgpu", "gguf adapter", "gguf merge", "merge", "peft wgpu"}),
        in_test=frozenset({"steps nf4"}),
        reading=Reading(o_bias=False),
    ),
    "Glm4ForCausalLM": Row(
        tiny=IDS,
        cases={"glm4": {"attention_bias": False}},
        refused={"use_qk_norm": True, "hidden_act": "mish"},
        in_test_all=ALIKE,
        reading=Reading(o_bias=False),
    ),
}
