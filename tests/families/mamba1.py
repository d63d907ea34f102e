"""Rows of families with Mamba-1."""

from __future__ import annotations

from typing import Any

from tests.families.common import (
    ALIKE,
    BACKBONE,
    BOTH,
    IDS,
    NOT_READ_BY_MAMBA,
    ON_WGPU,
    nowhere,
    without_attention,
)
from tests.families.row import Reading, Row

_REFUSED: dict[str, Any] = {"state_size": 65, "time_step_rank": "half", "hidden_act": "gelu", "conv_kernel": 9}
# Of Mamba and FalconMamba, which have no attention.
_TINY = {**IDS, "state_size": 6, "conv_kernel": 3, "time_step_rank": 5, "layer_norm_epsilon": 1e-5}
_READING = Reading(
    given={"state_size": 16},
    lacks=(
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "layer_norm_eps",
        "norm_epsilon",
        "rope_theta",
        "rope_scaling",
        "attention_bias",
        "mlp_bias",
        "use_bias",
        "use_sliding_window",
        "sliding_window",
        "max_window_layers",
        "layer_types",
        "no_rope_layers",
        "no_rope_layer_interval",
    ),
    prepare=without_attention,
    epsilon="layer_norm_epsilon",
    rotates=nowhere,
    read_nulls=0,
    refused_nulls=6,
    not_read=NOT_READ_BY_MAMBA,
)

ROWS = {
    "JambaForCausalLM": Row(
        tiny={
            **IDS,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 6,
            "mamba_d_conv": 3,
            "mamba_dt_rank": 5,
        },
        cases={
            "jamba": {"expert_layer_offset": 0, "num_hidden_layers": 3},
            "jamba_dense": {"num_experts": 1, "mamba_proj_bias": True, "mamba_conv_bias": False},
        },
        refused={
            "attn_layer_offset": 2,
            "expert_layer_offset": 5,
            "mamba_d_state": 65,
            "mamba_dt_rank": "half",
            "hidden_act": "gelu",
            "num_experts_per_tok": 6,
        },
        may_have_no_experts=True,
        unusual={
            "num_experts_per_tok": [1, 5],
            "expert_layer_offset": [0],
            "mamba_conv_bias": BOTH,
            "mamba_proj_bias": BOTH,
            "mamba_d_state": [1, 16],
            "mamba_dt_rank": ["auto"],
        },
        never_unusual=("hidden_act",),
        in_llama_cpp={"mamba_d_state": 16, "expert_layer_offset": 0},
        gguf_cases=({"num_experts": 1},),
        in_test_all=frozenset({"cases", "gguf merge"}),
        in_test=frozenset({"greedy jamba"}),
        reading=Reading(lacks=("layer_types",), rotates=nowhere),
    ),
    "MambaForCausalLM": Row(
        tiny=_TINY,
        cases={"mamba": {}},
        without_cache=("mamba",),
        # torch's softplus of more than 20, which only Mamba has here, is its argument.
        rounded=("mamba",),
        refused=_REFUSED,
        never_unusual=("hidden_act",),
        eager=True,
        names=BACKBONE,
        tied=True,
        in_llama_cpp={"intermediate_size": 128, "state_size": 16},
        in_test_all=ALIKE,
        reading=_READING,
    ),
    "FalconMambaForCausalLM": Row(
        tiny=_TINY,
        cases={"falcon_mamba": {"use_bias": True, "mixer_rms_eps": 1e-2}},
        without_cache=("falcon_mamba",),
        refused=_REFUSED,
        never_unusual=("hidden_act",),
        eager=True,
        names=BACKBONE,
        tied=True,
        in_llama_cpp={"intermediate_size": 128, "state_size": 16, "layer_norm_epsilon": 1e-6},
        in_test_all=(ALIKE | ON_WGPU) - {"gguf alone"},
        reading=_READING,
    ),
}
