"""Rows of Granite's families without Mamba-2."""

from __future__ import annotations

from tests.families.common import (
    ALIKE,
    GRANITE,
    GRANITE_VALUES,
    IDS,
    ON_WGPU,
    write_scales,
)
from tests.families.row import Row

ROWS = {
    "GraniteForCausalLM": Row(
        cases={
            "granite": {
                "embedding_multiplier": 3.0,
                "attention_multiplier": 0.4,
                "residual_multiplier": 0.3,
                "logits_scaling": 5.0,
            }
        },
        in_llama_cpp=GRANITE,
        paired=True,
        gguf_keys=write_scales,
    ),
    "HyperCLOVAXForCausalLM": Row(
        cases={
            "hyperclovax": {
                "embedding_multiplier": 3.0,
                "attention_multiplier": 0.4,
                "residual_multiplier": 0.3,
                "logits_scaling": 0.2,
            },
            "hyperclovax_without_norms": {"use_post_norm": False},
        },
        refused={"num_local_experts": 8, "final_logit_softcapping": 3.0},
        in_llama_cpp={**GRANITE, "use_post_norm": False},
        paired=True,
        gguf_keys=write_scales,
        in_test_all=ALIKE | {"cases"},
    ),
    "GraniteMoeForCausalLM": Row(
        cases={
            "granite_moe": {
                "embedding_multiplier": 3.0,
                "attention_multiplier": 0.4,
                "residual_multiplier": 0.3,
                "logits_scaling": 5.0,
                "num_experts": 7,
                "num_local_experts": 7,
                "num_experts_per_tok": 3,
            }
        },
        unusual=GRANITE_VALUES,
        in_llama_cpp=GRANITE,
        files_of_experts=".output_linear.",
        paired=True,
        gguf_keys=write_scales,
        in_test_all=ON_WGPU | {"merge", "peft cpu"},
    ),
    "GraniteMoeSharedForCausalLM": Row(
        cases={
            "granite_moe_shared": {"shared_intermediate_size": 52, "residual_multiplier": 0.3, "logits_scaling": 5.0}
        },
        unusual=GRANITE_VALUES,
        in_llama_cpp={**GRANITE, "shared_intermediate_size": 32},
        paired=True,
        gguf_keys=write_scales,
        in_test_all=ON_WGPU | {"cache cpu", "gguf merge", "merge", "peft cpu"},
    ),
    "GraniteMoeSWAForCausalLM": Row(
        tiny={"sliding_window": 7, "shared_intermediate_size": 52, "residual_multiplier": 0.3},
        cases={
            "granite_moe_swa": {
                "num_hidden_layers": 5,
                "sliding_window": 7,
                "shared_intermediate_size": 52,
                "attention_multiplier": 0.4,
                "residual_multiplier": 0.3,
                "layer_rope_theta": [0, 500.0, 500.0, 0, 90.0],
            }
        },
        refused={"layer_rope_theta": [1.5], "layer_types": ["conv"] * 2, "clip_qkv": 8.0},
        unusual=GRANITE_VALUES,
        eager=True,
        in_llama_cpp={**GRANITE, "num_hidden_layers": 3, "layer_rope_theta": [500.0, 500.0, 0.0]},
        adapted_layers={},
        files_of_experts=".experts.down_proj",
        paired=True,
        gguf_keys=write_scales,
        in_test_all=ALIKE | {"expert files"},
    ),
    "GraniteSWAForCausalLM": Row(
        tiny=IDS,
        cases={
            "granite_swa": {
                "num_hidden_layers": 5,
                "sliding_window": 7,
                "attention_multiplier": 0.4,
                "residual_multiplier": 0.3,
                "layer_rope_theta": [0, 500.0, 500.0, 0, 90.0],
            }
        },
        refused={"layer_rope_theta": [1.5], "layer_types": ["conv"] * 2, "num_local_experts": 4},
        eager=True,
        in_llama_cpp={**GRANITE, "sliding_window": 7, "num_hidden_layers": 3},
        paired=True,
        gguf_keys=write_scales,
    ),
}
