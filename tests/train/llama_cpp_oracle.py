"""llama.cpp's probabilities (the package xllamacpp), and small configurations of each family that it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.tools import oracle_package
from tests.train.conftest import VOCAB
from wgrad.train.model.families import FAMILIES

llama_cpp = oracle_package("xllamacpp")
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
GEMMA = {"query_pre_attn_scalar": 16, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
GRANITE = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.3, "logits_scaling": 0.25,
}  # fmt: skip
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
SIXTEEN = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
EXTRA: dict[str, dict[str, Any]] = {
    "GemmaForCausalLM": {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
    "Gemma2ForCausalLM": GEMMA,
    "Gemma3ForCausalLM": GEMMA | {"rope_theta": 1e6, "num_hidden_layers": 6},
    "GraniteForCausalLM": GRANITE,
    "GraniteMoeForCausalLM": GRANITE,
    "GraniteMoeSharedForCausalLM": GRANITE | {"shared_intermediate_size": 32},
    "Olmo3ForCausalLM": {"rope_theta": 5e5, "sliding_window": 7, "num_hidden_layers": 4},
    "PhiForCausalLM": {"hidden_act": "gelu_new"},
    "StableLmForCausalLM": {"use_qkv_bias": True, "use_parallel_residual": True},
    "Starcoder2ForCausalLM": {"hidden_act": "gelu_pytorch_tanh"},
    "Exaone4ForCausalLM": {"sliding_window": None, "sliding_window_pattern": None},
    "CohereForCausalLM": {"tie_word_embeddings": True, "logit_scale": 0.3},
    "Cohere2ForCausalLM": {"sliding_window": 7, "num_hidden_layers": 4, "tie_word_embeddings": True},
    "Ministral3ForCausalLM": {
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
    "OlmoForCausalLM": {"clip_qkv": 0.7},
    "Lfm2ForCausalLM": {"norm_eps": 1e-3},
    "Lfm2MoeForCausalLM": {"norm_eps": 1e-3, "routed_scaling_factor": 1.0, "tie_word_embeddings": True},
    "AfmoeForCausalLM": {"num_hidden_layers": 4, "layer_types": None, "mup_enabled": True},
    "ExaoneMoeForCausalLM": {"num_hidden_layers": 4, "layer_types": None},
    "HunYuanMoEV1ForCausalLM": {"moe_intermediate_size": 96},
    "DeepseekV2ForCausalLM": {"topk_method": "greedy", **YARN_OF_LATENTS},
    "DeepseekV3ForCausalLM": {"num_nextn_predict_layers": 0, **YARN_OF_LATENTS},
    "Mistral4ForCausalLM": {
        "rope_theta": None,
        "rope_parameters": YARN_OF_LATENTS["rope_scaling"]
        | dict.fromkeys(("mscale", "mscale_all_dim"), 1.0)
        | {"rope_theta": 500.0, "original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.4},
    },
    "MiniCPM3ForCausalLM": {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    "Jais2ForCausalLM": {"hidden_act": "relu2"},
    "Dots1ForCausalLM": {"num_key_value_heads": 4, "norm_topk_prob": True},
    "OlmoeForCausalLM": {"num_key_value_heads": 4},
    "ApertusForCausalLM": {"hidden_act": "xielu", "rope_scaling": {"rope_type": "default"}},
    "Glm4MoeForCausalLM": {"num_nextn_predict_layers": 0, "use_qk_norm": True},
    "HyperCLOVAXForCausalLM": {**GRANITE, "use_post_norm": False},
    "GraniteMoeHybridForCausalLM": {**GRANITE, "position_embedding_type": "rope", "shared_intermediate_size": 96},
    **dict.fromkeys(
        ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
        {"linear_num_value_heads": 6, **SIXTEEN, "partial_rotary_factor": 0.5},
    ),
    "FalconH1ForCausalLM": {
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": True,
        **dict.fromkeys(("embedding_multiplier", "attention_in_multiplier", "ssm_out_multiplier"), 1.3),
        **dict.fromkeys(("lm_head_multiplier", "attention_out_multiplier", "ssm_in_multiplier"), 0.7),
        "mlp_multipliers": [0.6, 1.7],
    },
    "Mamba2ForCausalLM": {"expand": 2, "time_step_limit": None},
    "NemotronHForCausalLM": {
        "mlp_hidden_act": "relu2",
        "time_step_min": 0.0,
        "num_hidden_layers": None,
        "mamba_head_dim": 14,
    },
    "Qwen3MoeForCausalLM": {"norm_topk_prob": True, "moe_intermediate_size": 32},
}
# llama.cpp has these sizes of Gemma 3n; its deviation of a gate is that of a sample: here of many numbers.
EXTRA["Gemma3nForCausalLM"] = {
    "num_kv_shared_layers": 0, "layer_types": ["sliding_attention"] * 2, "num_hidden_layers": 2, "laurel_rank": 64,
    "altup_num_inputs": 4, "hidden_size_per_layer_input": 256, "intermediate_size": 1024,
    "activation_sparsity_pattern": [0.95] * 2, "final_logit_softcapping": 30.0, "rope_local_base_freq": 500.0,
}  # fmt: skip
SLIDING = {"rope_type": "default", "rope_theta": 500.0}
YARN_OF_FULL = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
EXTRA["LagunaForCausalLM"] = {
    "num_hidden_layers": 3, "layer_types": ["full_attention"] + ["sliding_attention"] * 2,
    "num_attention_heads_per_layer": [4, 6, 2],
    "rope_parameters": {
        "full_attention": YARN_OF_FULL | {"rope_theta": 9000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": SLIDING,
    },
}  # fmt: skip
EXTRA["MellumForCausalLM"] = {
    "rope_parameters": {"full_attention": YARN_OF_FULL | {"rope_theta": 500.0}, "sliding_attention": SLIDING},
}  # fmt: skip
EXTRA["Cohere2MoeForCausalLM"] = {"num_hidden_layers": 3, "layer_types": None, "tie_word_embeddings": True}
EXTRA["GraniteSWAForCausalLM"] = GRANITE | {"sliding_window": 7, "num_hidden_layers": 3}
EXTRA["GraniteMoeSWAForCausalLM"] = GRANITE | {"num_hidden_layers": 3, "layer_rope_theta": [500.0, 500.0, 0.0]}
EXTRA["Gemma4ForCausalLM"] = {"use_double_wide_mlp": True, "final_logit_softcapping": 3.0}
EXTRA["Llama4ForCausalLM"] = {
    "num_hidden_layers": 4, "no_rope_layers": None, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 64,
}  # fmt: skip
GELU = ("Gemma", "PhiFor", "Starcoder", "GPTNeoX", "GPT2", "GPTBigCode", "Falcon")
IN_GGUF = [name for name, family in FAMILIES.items() if family.gguf]


def their_log_probabilities(
    base: Path, prompt: np.ndarray | str, adapter: Path | None, vocabulary: int = VOCAB, context: int = 64
) -> np.ndarray:
    """llama.cpp's, of every token after a prompt (ids, or a text), float32 [vocabulary]."""
    params = llama_cpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers = str(base), context, 1, 0
    params.warmup, params.verbosity, params.cpuparams.n_threads = False, -1, 1
    params.flash_attn_type = llama_cpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
    if adapter is not None:
        params.lora_adapters = [llama_cpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
    given = prompt if isinstance(prompt, str) else prompt.reshape(-1).tolist()
    request = {"prompt": given, "n_predict": 1, "temperature": -1, "n_probs": vocabulary}
    answer = llama_cpp.Server(params).handle_completions(request)
    told = answer["choices"][0]["logprobs"]
    if told is None:
        raise LookupError("nothing is told where the likeliest token ends a text or is a part of a character")
    found = told["content"][0]["top_logprobs"]
    values = np.full(vocabulary, np.nan, np.float32)
    values[[entry["id"] for entry in found]] = [entry["logprob"] for entry in found]
    return values


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of the last token."""
    last = logits[-1].astype(np.float64)
    return last - last.max() - np.log(np.exp(last - last.max()).sum())
