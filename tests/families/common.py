"""Parts that rows of several families share."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

VOCAB = 300

# ---- tiny models ---------------------------------------------------------------------------------
# transformers' defaults of these are outside the vocabulary.
IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
GEMMA4 = {**IDS, "tie_word_embeddings": True, "global_head_dim": 20, "sliding_window": 7, "rope_theta": None}
# Odd sizes of latents, and values narrower than keys.
LATENT = {
    **IDS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 22,
    "q_lora_rank": 26,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
}
GROUPS_OF_EXPERTS = {
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "sliding_window": None,
}
# Gemma 4 with experts alongside the MLP.
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 32}
MAMBA = {
    "mamba_expand": 3,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 16,
}


def without_windows(config: dict[str, Any]) -> None:
    config.setdefault("layer_types", ["full_attention"] * config["num_hidden_layers"])


def without_head_dim(config: dict[str, Any]) -> None:
    del config["head_dim"]


def with_heads_of_mamba(config: dict[str, Any]) -> None:
    config["num_heads"] = config["expand"] * config["hidden_size"] // config["head_dim"]


def with_width_of_keys(config: dict[str, Any]) -> None:
    config["head_dim"] = config["qk_rope_head_dim"] + config["qk_nope_head_dim"]


# ---- configurations that are compared ------------------------------------------------------------
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.1] * 6, "long_factor": [1.5, 2.0, 3.0, 4.5, 7.0, 9.0]}
# The padding id's row has no gradient in torch.
GEMMA2: dict[str, Any] = {
    "num_hidden_layers": 3,
    "sliding_window": 7,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
    "pad_token_id": None,
}
FAR_FROM_CAPS = {"final_logit_softcapping": 400.0}  # near them the largest logits are equal
UNGROUPED: dict[str, Any] = {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "mlp_bias": True}
UNGROUPED_LATENTS = UNGROUPED | {"moe_latent_size": 22}

# ---- unusual values of keys ----------------------------------------------------------------------
BOTH = [True, False]
KINDS = [["full_attention", "sliding_attention"], ["sliding_attention"] * 2]
GRANITE_VALUES: dict[str, list[Any]] = {
    "num_experts_per_tok": [1, 5],
    "embedding_multiplier": [3.0],
    "attention_multiplier": [0.4],
    "residual_multiplier": [0.3],
    "logits_scaling": [5.0, 0.5],
    "shared_intermediate_size": [17, 52],
}
SCORED_VALUES: dict[str, list[Any]] = {
    "num_experts_per_tok": [1, 4],  # of the 6 experts in 3 groups, 2 of which a token uses
    "n_shared_experts": [1, 3],
    "first_k_dense_replace": [0, 1, 2],
    "routed_scaling_factor": [0.3, 2.5],
    "moe_intermediate_size": [25],
}
LATENT_VALUES = SCORED_VALUES | {"q_lora_rank": [None, 9], "v_head_dim": [4, 16], "kv_lora_rank": [7]}
CHOSEN_VALUES: dict[str, list[Any]] = {"num_experts_per_tok": [1, 3, 5], "moe_intermediate_size": [25]}
QWEN_VALUES: dict[str, list[Any]] = CHOSEN_VALUES | {
    "norm_topk_prob": BOTH,
    "decoder_sparse_step": [2],
    "mlp_only_layers": [[0]],
    "shared_expert_intermediate_size": [17],
}
WINDOW_VALUES: dict[str, list[Any]] = {"sliding_window": [1, 5], "layer_types": KINDS}

# ---- names in transformers' models ---------------------------------------------------------------
GPT2_NAMES = (
    ("model.embed_tokens.", "transformer.wte."),
    ("model.layers.", "transformer.h."),
    ("model.", "transformer."),
)
FALCON_NAMES = (
    ("model.embed_tokens.", "transformer.word_embeddings."),
    ("model.layers.", "transformer.h."),
    ("model.", "transformer."),
)
NEOX_NAMES = (("model.embed_tokens.", "gpt_neox.embed_in."), ("model.", "gpt_neox."))
OPT_NAMES = (("model.", "model.decoder."),)
EMBEDDINGS = (("model.embed_tokens.", "model.embeddings."),)
BACKBONE = (("model.embed_tokens.", "backbone.embeddings."), ("model.", "backbone."))

# ---- llama.cpp -----------------------------------------------------------------------------------
GEMMA = {"query_pre_attn_scalar": 16, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.3,
    "logits_scaling": 0.25,
}
YARN_OF_LATENTS = {
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
}
HYBRID = {
    "mamba_expand": 2,
    "mamba_n_heads": 4,
    "layer_types": ["mamba", "attention"],
    "position_embedding_type": "nope",
    "shared_intermediate_size": 88,
}
HYBRID_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 40}
SLIDING = {"rope_type": "default", "rope_theta": 500.0}
LLAMA3_64 = LLAMA3 | {"original_max_position_embeddings": 64, "rope_theta": 100.0}
LLAMA3_8192 = LLAMA3 | {"original_max_position_embeddings": 8192}
LINEAR_3 = {"rope_type": "linear", "factor": 3.0}
YARN_16 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE_OF_PART: dict[str, Any] = {
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 8,  # fewer than the tokens compared: llama.cpp goes by its context
    "rope_scaling": {**LONGROPE, "short_factor": [1.5] * 6},
}
LONGROPE_OF_16 = LONGROPE_OF_PART | {
    "original_max_position_embeddings": 16,
    "rope_scaling": {**LONGROPE, "short_factor": [1.5] * 6, "attention_factor": 1.25},
}
SIXTEEN = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}


def write_yarn(writer: Any, config: Any) -> None:
    writer.add_rope_scaling_type(SimpleNamespace(value="yarn"))
    writer.add_rope_scaling_factor(config.rope.factor)
    writer.add_rope_scaling_orig_ctx_len(config.rope.original_max_position_embeddings)


def write_yarn_and_growth(writer: Any, config: Any) -> None:
    writer.add_rope_scaling_type(SimpleNamespace(value="yarn"))
    writer.add_rope_scaling_factor(config.rope.factor)
    writer.add_rope_scaling_orig_ctx_len(config.query_length)
    writer.add_rope_scaling_yarn_log_mul(1.0)
    writer.add_attn_temperature_scale(config.query_growth)


def write_parallel(writer: Any, config: Any) -> None:
    writer.add_parallel_residual(config.parallel)


def write_logit_scale(writer: Any, config: Any) -> None:
    writer.add_logit_scale(config.logit_scale)


def write_scales(writer: Any, config: Any) -> None:
    writer.add_embedding_scale(config.embedding_scale)
    writer.add_attention_scale(config.score_scale or config.head_dim**-0.5)
    writer.add_residual_scale(config.residual_scale)
    writer.add_logit_scale(1 / config.logit_scale)


def multiplied(config: Any) -> Any:
    """Return a configuration whose weights have the multipliers."""
    plain = {f.name: f.default for f in fields(config) if f.name.endswith("_scale")}
    linear = replace(config.linear, in_scale=1.0, out_scale=1.0, scales=(1.0,) * 5, norm_first=False)
    return replace(config, **{**plain, "score_scale": config.head_dim**-0.5, "linear": linear})


# ---- config.json as transformers reads it --------------------------------------------------------
SLIDES = ["sliding_attention", "full_attention", "sliding_attention"]
LINEAR, OLDER = {"rope_type": "linear", "factor": 8.0}, {"type": "linear", "factor": 8.0}
LLAMA3_ALONE = {key: value for key, value in LLAMA3.items() if not key.startswith("original")}
FLAT = {**LINEAR, "rope_theta": 77.0}
NESTED = {"full_attention": {"rope_theta": 77.0}, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}
# Of layers with a window that rotate in their own way.
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_parameters": FLAT},
    {"rope_parameters": FLAT, "rope_theta": 50.0},
    {"rope_scaling": OLDER},
    {"rope_scaling": LINEAR | OLDER},
    {"rope_scaling": LINEAR, "rope_parameters": NESTED},
    {"rope_scaling": OLDER, "rope_parameters": NESTED},
    {"rope_scaling": {**LINEAR, "rope_theta": 99.0}, "rope_parameters": NESTED, "rope_theta": 11.0},
    {"rope_parameters": {"full_attention": {**YARN, "truncate": False}}},
    {"rope_parameters": {"full_attention": {**YARN, "truncate": False}, "truncate": False}},
    {"rope_parameters": {"full_attention": LLAMA3_ALONE}, "original_max_position_embeddings": 16},
)
NESTED_WAYS = tuple({"layer_types": SLIDES, **rope} for rope in _ROPES)
GPT2_SIZES = {"rotary_dim": 4, "n_embd": 128, "n_layer": 6, "n_head": 32, "n_positions": 256, "n_inner": 88}
NOT_READ_BY_MAMBA = (
    r"time_step_(floor|min|max|limit|rank|scale|init_scheme)|rescale_prenorm_residual|residual_in_fp32|expand"
    r"|chunk_size|use_mamba_kernels"
    r"|mamba_(proj_bias|ssm_cache_dtype)|sliding_window|mtp_layers_block_type|moe_shared_expert_overlap"
    r"|n_shared_experts"
)


def slides(theirs: Any) -> list[bool]:
    """Rotary embeddings of layers with a window alone. theirs: the configuration of transformers."""
    return [kind == "sliding_attention" for kind in getattr(theirs, "layer_types", None) or ()]


def with_windows(theirs: Any) -> list[bool]:
    return [kind and theirs.sliding_window is not None for kind in slides(theirs)]


def with_windows_if_any(theirs: Any) -> list[bool]:
    return slides(theirs) if theirs.sliding_window else [True] * theirs.num_hidden_layers


def with_windows_or_none(theirs: Any) -> list[bool]:
    return [kind or theirs.sliding_window is None for kind in slides(theirs)]


def with_windows_or_dense(theirs: Any) -> list[bool]:
    dense = [kind == "dense" and theirs.prefix_dense_sliding_window_pattern == 1 for kind in theirs.mlp_layer_types]
    return [kind or own for kind, own in zip(with_windows(theirs), dense)]


def nowhere(theirs: Any) -> list[bool]:
    return [False] * theirs.num_hidden_layers


def by_position_type(theirs: Any) -> list[bool]:
    return [theirs.position_embedding_type == "rope"] * theirs.num_hidden_layers


def everywhere(theirs: Any) -> list[int]:
    """Windows of all layers."""
    return [theirs.sliding_window or 0] * theirs.num_hidden_layers


def where_local(theirs: Any) -> list[int]:
    return [theirs.window_size if kind == "local" else 0 for kind in theirs.attention_layers]


def of_two_kinds(theirs: Any) -> tuple[int, int]:
    """Widths of heads in layers without a window and with one."""
    return theirs.per_layer_config[5].head_dim, theirs.per_layer_config[0].head_dim


def four_times_as_wide(theirs: Any) -> None:
    theirs.intermediate_size = theirs.intermediate_size or 4 * theirs.hidden_size


def without_attention(theirs: Any) -> None:
    theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim = 1, 1, 2
    theirs.intermediate_size, theirs.max_position_embeddings = 0, 1 << 20


# ---- make test-all -------------------------------------------------------------------------------
# Of families whose features others have too, `make test` compares the first case on the CPU.
ALIKE = frozenset({"logits wgpu", "peft", "merge", "cache", "gguf merge", "gguf adapter", "gguf alone"})
ON_WGPU = frozenset({"logits wgpu", "peft wgpu", "cache wgpu"})
