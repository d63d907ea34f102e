"""Hugging Face's names of the tensors of GGUF files, by architecture.

Source: github.com/ggml-org/llama.cpp, gguf-py, gguf/constants.py and gguf/tensor_mapping.py.
"""

from __future__ import annotations

import re

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
}
_OLMO2 = _NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA = _OLMO2 | {"ffn_norm": "pre_feedforward_layernorm"}
# Gemma 3n and 4: layers with embeddings of their own.
_PER_LAYER = _GEMMA | {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
STREAMS = 16  # most streams of AltUp; their projections are parts of one tensor
_STREAMS = {"altup_proj": "model.altup_projections", "altup_unembd_proj": "model.altup_unembed_projections"}
_GEMMA_3N = _PER_LAYER | {
    **{f"{part}.{i}": f"{ours}.{i}" for part, ours in _STREAMS.items() for i in range(STREAMS)},
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_GEMMA_4 = _PER_LAYER | {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    **{f"ffn_{part}_exps": f"experts.{part}_proj" for part in ("gate", "up", "down", "gate_up")},
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_PHI2 = _NAMES | {
    "output_norm": "model.final_layernorm",
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_GPT_NEOX = {
    **{part: _NAMES[part] for part in ("token_embd", "output", "attn_norm", "ffn_norm")},
    "output_norm": "model.final_layer_norm",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_FALCON = {part: path.replace("attention.", "self_attention.") for part, path in _GPT_NEOX.items()} | {
    "output_norm": "model.ln_f",
    "attn_norm_2": "ln_attn",
}
_GPT2 = {
    **{part: _NAMES[part] for part in ("token_embd", "output")},
    "position_embd": "model.wpe",
    "output_norm": "model.ln_f",
    "attn_norm": "ln_1",
    "ffn_norm": "ln_2",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
# Norm of attention and MLP. Where attention has its own, the file has the MLP's in its place.
NORMS_OF_FALCON = ".input_layernorm.", ".ln_attn.", ".ln_mlp."
_PHI3 = _NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GPT_OSS = _NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "attn_sinks.weight": "self_attn.sinks",
}
_GRANITE_MOE = _NAMES | {"ffn_gate_inp": "mlp.router"}
_BLOCK_SPARSE = {
    name: path.replace("mlp.", "block_sparse_moe.")
    for name, path in _GRANITE_MOE.items()
    if "_exps" in name or name == "ffn_gate_inp"
}
_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_DELTA_NET = _NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
_LFM2 = _NAMES | {
    "token_embd_norm": "model.embedding_norm",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    **{f"shortconv.{part}.weight": f"conv.{part}.weight" for part in ("conv", "in_proj", "out_proj")},
}
_SCORED = {
    **{name: path.replace("shared_expert", "shared_experts") for name, path in _SHARED.items()},
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
_LFM2_MOE = _LFM2 | {
    **{name: path.replace("mlp.", "feed_forward.") for name, path in _NAMES.items() if "_exps" in name},
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
}
_LLAMA4 = {
    name: path.replace("mlp.", "feed_forward.") for name, path in (_NAMES | _SHARED).items() if name.startswith("ffn_")
} | {"ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "feed_forward.router"}
_HUNYUAN = _NAMES | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_HUNYUAN_MOE = _HUNYUAN | {
    **{name: path.replace("shared_expert", "shared_mlp") for name, path in _SHARED.items()},
    "ffn_gate_inp": "mlp.gate.wg",
}
_AFMOE = (
    _NAMES
    | _SCORED
    | {
        "attn_gate": "self_attn.gate_proj",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_mlp_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_gate_inp": "mlp.router.gate",
        "exp_probs_b.bias": "mlp.expert_bias",
    }
)
_LATENT = _NAMES | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",  # newer files have these two instead of attn_kv_b
    "attn_v_b": "self_attn.v_b_proj",
}
_MAMBA = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
}
# Mamba-1, whose time steps have a projection and not only a bias.
_MAMBA1 = {
    **{part: path for part, path in _MAMBA.items() if part not in ("ssm_norm", "ssm_dt.bias")},
    "ssm_x": "mamba.x_proj",
    "ssm_dt": "mamba.dt_proj",
    **{f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
}
_FALCON_H1 = {
    "output_norm": "model.final_layernorm",
    "ffn_norm": "pre_ff_layernorm.weight",  # the name in the file has no ending
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
}
_MAMBA2 = {
    **{name: path.replace("mamba.", "mixer.") for name, path in _MAMBA.items()},
    "output_norm": "model.norm_f",
    "attn_norm": "norm",
}
_NEMOTRON_H = _MAMBA2 | {
    **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
    "attn_output": "mixer.o_proj",
    **{f"ffn_{part}": f"mixer.{part}_proj" for part in ("up", "down")},
}
_NEMOTRON_H_MOE = _NEMOTRON_H | {
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    **{f"ffn_{part}_exps": f"mixer.experts.{part}_proj" for part in ("up", "down")},
    **{f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
    **{"ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj"},
}
QKV = "attn_qkv"  # files of Phi-2 may have q, k and v in one tensor
# Divisors of each pair's frequency: llama3's scaling, and longrope's beyond the original length and within it.
ROPE_FACTORS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
# Names of tensors by general.architecture.
ARCHITECTURES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "qwen3moe", "olmoe", "smollm3", "granite", "gemma"), _NAMES),
    "stablelm": _NAMES | {f"attn_{part}_norm": f"self_attn.{part}_layernorm" for part in "qk"},
    **dict.fromkeys(("gemma2", "gemma3"), _GEMMA),
    "gemma3n": _GEMMA_3N,
    "gemma4": _GEMMA_4,
    "olmo2": _OLMO2,
    "phi2": _PHI2,
    "phi3": _PHI3,
    "gptneox": _GPT_NEOX,
    "falcon": _FALCON,
    **dict.fromkeys(("gpt2", "starcoder"), _GPT2),
    "starcoder2": _NAMES | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    **dict.fromkeys(("ernie4_5", "arcee", "nemotron", "jais2", "cohere2", "command-r", "olmo", "mistral3"), _NAMES),
    "seed_oss": _NAMES | {"post_attention_norm": "post_attention_layernorm"},
    "exaone4": _OLMO2,
    "gpt-oss": _GPT_OSS,
    "granitemoe": _NAMES | _BLOCK_SPARSE | _SHARED,
    "granitehybrid": _NAMES | _BLOCK_SPARSE | _SHARED | _MAMBA,
    "granite_swa": _NAMES
    | _BLOCK_SPARSE
    | {
        "attn_sinks.weight": "self_attn.sinks",
        "ffn_up_shexp": "shared_mlp.input_linear",
        "ffn_down_shexp": "shared_mlp.output_linear",
    },
    "jamba": _NAMES
    | _MAMBA1
    | {name: path.replace("mlp.", "feed_forward.") for name, path in _NAMES.items() if name.startswith("ffn_")}
    | {"output_norm": "model.final_layernorm", "ffn_norm": "pre_ff_layernorm", "ffn_gate_inp": "feed_forward.router"},
    "mamba": {part: _NAMES[part] for part in ("token_embd", "output")}
    | {name: path.replace("mamba.", "mixer.") for name, path in _MAMBA1.items()}
    | {"output_norm": "model.norm_f", "attn_norm": "norm"},
    "falcon-h1": _NAMES | _MAMBA | _FALCON_H1,
    "mamba2": {part: _NAMES[part] for part in ("token_embd", "output")} | _MAMBA2,
    "nemotron_h": _NAMES | _NEMOTRON_H,
    "nemotron_h_moe": _NAMES | _NEMOTRON_H_MOE,
    "hunyuan-dense": _HUNYUAN,
    "hunyuan-moe": _HUNYUAN_MOE,
    # llama.cpp's converter writes the correction's name without an ending.
    "hy_v3": _NAMES | _SCORED | dict.fromkeys(("exp_probs_b.bias", "exp_probs_b"), "mlp.e_score_correction_bias"),
    "laguna": _NAMES | _SCORED | {"attn_gate": "self_attn.g_proj"},
    "mellum": _NAMES,
    "cohere2moe": _NAMES | _SCORED,
    "llama4": _NAMES | _LLAMA4,
    "apertus": _NAMES | {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
    "qwen2moe": _NAMES | _SHARED,
    "glm4moe": _NAMES | _SCORED | {"post_attention_norm": "post_attention_layernorm"},
    "dots1": _NAMES | _SCORED,
    "ernie4_5-moe": _NAMES | _SCORED | {"exp_probs_b.bias": "mlp.gate.moe_statics.e_score_correction_bias"},
    "qwen3next": _DELTA_NET
    | _SHARED
    | {"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"},  # the first: in older files
    "qwen35": _DELTA_NET,
    "qwen35moe": _DELTA_NET | _SHARED,
    "lfm2": _LFM2,
    "lfm2moe": _LFM2_MOE,
    "afmoe": _AFMOE,
    "exaone-moe": _NAMES | _SCORED,
    "minimax-m2": _NAMES | {"exp_probs_b.bias": "mlp.e_score_correction_bias"},
    **dict.fromkeys(("deepseek2", "mistral4"), _LATENT | _SCORED),
    "minicpm3": _LATENT,
    "chatglm": _NAMES | {"ffn_up": "mlp.gate_up_proj"},
    "glm4": _NAMES
    | {
        "ffn_up": "mlp.gate_up_proj",
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
}


def hugging_face_name(name: str, names: dict[str, str]) -> tuple[str, str]:
    """Return Hugging Face's name of a tensor (an unknown one is kept), and its part: attn_q, ..., or ""."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(.*)", name, re.DOTALL)
    assert found
    layer, (part, _, kind) = f"model.layers.{found[1]}." if found[1] else "", found[2].rpartition(".")
    if found[2] in names:  # a name without the usual ending
        return layer + names[found[2]], found[2]
    return (f"{layer}{names[part]}.{kind}", part) if part in names and kind in ("weight", "bias") else (name, "")


def gguf_name(name: str, names: dict[str, str]) -> str:
    """Return GGUF's name of a tensor by Hugging Face's, or "" if it has none: the inverse of `hugging_face_name`."""
    found = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.*)", name, re.DOTALL)
    assert found
    block, parts = f"blk.{found[1]}." if found[1] else "", {path: part for part, path in names.items()}
    if found[2] in parts:  # weights of experts have no ending in our names
        part = parts[found[2]]
        return f"{block}{part}.weight" if part.endswith("_exps") else block + part
    path, _, kind = found[2].rpartition(".")
    return f"{block}{parts[path]}.{kind}" if path in parts else ""
