"""Families with experts, several keys of config.json at unusual values at once: logits, loss and gradients, also of the
load-balancing loss, against transformers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.train.conftest import distance
from tests.train.model_oracle import CORRECTION, ROWS, TOKENS, batch, full_model, load_oracle, make_inputs, torch
from tests.train.peft_oracle import as_theirs
from tests.train.tiny_models import GEMMA4_EXPERTS, tiny_config
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.contract import Device
from wgrad.train.model.balance import Balance
from wgrad.train.model.families import FAMILIES
from wgrad.train.model.load_config import parse_model_config

pytestmark = [pytest.mark.oracle, pytest.mark.all]

SEEDS = 2
NOISE = 1e-4  # gradients smaller than this part of the largest are rounding alone
BOTH = [True, False]
KINDS = [["full_attention", "sliding_attention"], ["sliding_attention"] * 2]
COMMON: dict[str, list[Any]] = {
    "attention_bias": BOTH,
    "rms_norm_eps": [1e-2],
    "tie_word_embeddings": BOTH,
    "hidden_act": ["gelu_pytorch_tanh", "gelu", "quick_gelu", "relu", "relu2"],
}
GRANITE: dict[str, list[Any]] = {
    "num_experts_per_tok": [1, 5],
    "embedding_multiplier": [3.0],
    "attention_multiplier": [0.4],
    "residual_multiplier": [0.3],
    "logits_scaling": [5.0, 0.5],
    "shared_intermediate_size": [17, 52],
}
SHARED: dict[str, list[Any]] = {
    "num_experts_per_tok": [1, 4],  # of the 6 experts in 3 groups, 2 of which a token uses
    "n_shared_experts": [1, 3],
    "first_k_dense_replace": [0, 1, 2],
    "routed_scaling_factor": [0.3, 2.5],
    "moe_intermediate_size": [25],
}
LATENT = SHARED | {"q_lora_rank": [None, 9], "v_head_dim": [4, 16], "kv_lora_rank": [7]}
CHOSEN: dict[str, list[Any]] = {"num_experts_per_tok": [1, 3, 5], "moe_intermediate_size": [25]}
QWEN: dict[str, list[Any]] = CHOSEN | {
    "norm_topk_prob": BOTH,
    "decoder_sparse_step": [2],
    "mlp_only_layers": [[0]],
    "shared_expert_intermediate_size": [17],
}
WINDOWS: dict[str, list[Any]] = {"sliding_window": [1, 5], "layer_types": KINDS}
# Values of keys by model_type. Each key is left out of half of the configurations.
KEYS: dict[str, dict[str, list[Any]]] = {
    "qwen3_moe": QWEN | {"use_sliding_window": [True], "sliding_window": [1, 5]},
    "qwen2_moe": QWEN | {"use_sliding_window": [True], "sliding_window": [1, 5], "qkv_bias": [False]},
    "qwen3_next": QWEN,
    "qwen3_5_moe_text": CHOSEN | {"shared_expert_intermediate_size": [17]},
    "mixtral": CHOSEN | {"sliding_window": [1, 5]},
    "olmoe": CHOSEN | {"norm_topk_prob": BOTH},
    "flex_olmo": CHOSEN | {"norm_topk_prob": BOTH},
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoe_swa"), GRANITE),
    "granitemoehybrid": GRANITE | {"layer_types": [["mamba", "attention"]]},
    "gpt_oss": WINDOWS | {"num_experts_per_tok": [1, 5], "swiglu_limit": [0.6, 2.0], "swiglu_alpha": [1.3]},
    "deepseek_v2": LATENT | {"kv_lora_rank": [8], "topk_method": ["greedy", "group_limited_greedy"], "mlp_bias": BOTH},
    "deepseek_v3": LATENT | {"rope_interleave": BOTH, "norm_topk_prob": BOTH},
    "axk1": {key: values for key, values in LATENT.items() if key != "q_lora_rank"}
    | {"rope_interleave": BOTH, "norm_topk_prob": BOTH, "moe_layer_freq": [1, 2]},
    "glm4_moe_lite": LATENT | {"first_k_dense_replace": [1], "mlp_layer_types": [["sparse", "dense"]]},
    "mistral4": LATENT | {"rope_interleave": BOTH, "norm_topk_prob": BOTH},
    "glm4_moe": SHARED | {"use_qk_norm": BOTH, "norm_topk_prob": BOTH, "partial_rotary_factor": [1.0]},
    "solar_open": SHARED | {"norm_topk_prob": BOTH},
    "dots1": SHARED | {"norm_topk_prob": BOTH, "sliding_window": [5], "max_window_layers": [0, 1]},
    "exaone_moe": WINDOWS | {"num_experts_per_tok": [1, 5], "num_shared_experts": [1, 2], "norm_topk_prob": BOTH},
    "afmoe": WINDOWS | CHOSEN | {"num_shared_experts": [2], "mup_enabled": BOTH, "num_dense_layers": [0, 1]},
    "ernie4_5_moe": CHOSEN | {"use_bias": BOTH, "moe_num_shared_experts": [0, 1], "moe_layer_start_index": [0]},
    "minimax_m2": {"num_experts_per_tok": [1, 5], "rotary_dim": [4, 12]},
    "hunyuan_v1_moe": {"moe_topk": [1, 5]},
    "cohere2_moe": {
        "num_experts_per_tok": [1, 5],
        "num_shared_experts": [0, 2],
        "expert_selection_fn": ["softmax", "sigmoid"],
        "shared_expert_combination_strategy": ["average", "sum"],
        "norm_topk_prob": BOTH,
        "logit_scale": [0.3],
        "mlp_layer_types": [["dense", "sparse"]],
    },
    "lfm2_moe": CHOSEN | {"use_expert_bias": BOTH, "norm_topk_prob": BOTH, "conv_L_cache": [2, 4]},
    "llama4_text": {"use_qk_norm": BOTH, "interleave_moe_layer_step": [2], "floor_scale": [3], "attn_scale": [0.3]},
    "mellum": WINDOWS | CHOSEN | {"norm_topk_prob": BOTH, "mlp_layer_types": [["sparse", "dense"]]},
    "phimoe": {"router_jitter_noise": [0.0, 1.0], "lm_head_bias": BOTH, "sliding_window": [5]},
    "nemotron_h": {
        "num_experts_per_tok": [1, 4],
        "norm_topk_prob": BOTH,
        "moe_latent_size": [22],
        "use_bias": BOTH,
        "mlp_bias": BOTH,
        "mlp_hidden_act": ["relu2", "silu", "gelu"],
        "moe_shared_expert_intermediate_size": [17],
    },
    "gemma4_text": {"top_k_experts": [1, 5], "final_logit_softcapping": [3.0]},
    "laguna": {"num_experts_per_tok": [1, 5], "gating": ["per-element"], "moe_routed_scaling_factor": [0.3]},
    **dict.fromkeys(("flint", "kolibri1"), CHOSEN | {"norm_topk_prob": BOTH, "shared_expert_intermediate_size": [17]}),
    "hy_v3": CHOSEN | {"num_shared_experts": [2], "router_scaling_factor": [0.3], "mlp_bias": BOTH},
}
# What a tiny model needs to have experts.
OWN = {"gemma4_text": GEMMA4_EXPERTS | {"moe_intermediate_size": 36}, "granitemoehybrid": {"num_local_experts": 5}}
SAME_ACTIVATION = ("gpt_oss", "hy_v3", "nemotron_h", "qwen3_next", "qwen3_5_moe", "granitemoehybrid", "gemma4")
WITH_EXPERTS = {name: family.model_type for name, family in FAMILIES.items() if family.model_type in KEYS}


def changes(architecture: str, seed: int) -> dict[str, Any]:
    """Return some keys of a family at unusual values, always the same for a seed."""
    kind, draw = WITH_EXPERTS[architecture], random.Random(f"{architecture} {seed}")
    keys = COMMON | KEYS[kind]
    found = {key: draw.choice(values) for key, values in keys.items() if draw.random() < 0.5}
    if kind.removesuffix("_text") in SAME_ACTIVATION:
        found.pop("hidden_act", None)
    if kind in ("nemotron_h", "gemma4_text"):  # the first is never tied in transformers, the other always
        found.pop("tie_word_embeddings", None)
    found |= {"output_router_logits": True, "router_aux_loss_coef": 0.7}
    return OWN.get(kind, {}) | found


def test_every_family_with_experts_is_here() -> None:
    found = {name for name in FAMILIES if parse_model_config(tiny_config(name)).experts is not None}
    assert found <= WITH_EXPERTS.keys()


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("architecture", WITH_EXPERTS)
def test_unusual_keys_give_what_transformers_gives(architecture: str, seed: int, make_checkpoint: Any) -> None:
    folder = make_checkpoint(architecture, **changes(architecture, seed))
    device: Device = ReferenceDevice()
    theirs = load_oracle(folder)
    model, parameters = full_model(folder, device)
    ids, _ = batch(model.config.vocab_size, seed=seed)
    given = torch.tensor(ids.astype(np.int64))
    found = theirs(given, labels=given, attention_mask=torch.ones_like(given), use_cache=False)
    found.loss.backward()

    experts = model.config.experts
    if experts is not None and experts.balance:
        model.balance = Balance(experts.balance, experts, ids.size, device)
    targets = np.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]
    inputs, count = make_inputs(device, ids, targets), ROWS * (TOKENS - 1)
    inputs.tables = model.token_tables(ids.size)
    if inputs.tables is not None:
        inputs.tables.write(device, np.tile(np.arange(TOKENS, dtype=np.int32), (ROWS, 1)), np.zeros_like(ids))
    logits = device.download(model.logits(model.hidden(inputs).data))
    assert distance(logits, found.logits.detach().numpy().reshape(logits.shape)) < 1e-5
    loss = model.loss(inputs)
    assert float(loss.numpy()[0]) / count == pytest.approx(float(found.loss.detach()), rel=1e-5)
    loss.backward()
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    compared = 0
    for name, tensor in parameters.tensors.items():
        true = wanted.get(name)
        if true is None or name.endswith(CORRECTION) or float(true.abs().max()) < NOISE * largest:
            continue
        ours = torch.tensor(device.download(tensor.gradient) / count)
        assert distance(as_theirs(theirs, ours, true.shape).numpy(), true.numpy()) < 2e-4, name
        compared += 1
    assert compared > len(parameters.tensors) / 2
