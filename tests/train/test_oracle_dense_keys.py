"""Random configurations of every family without experts: odd sizes, rotary scaling and switches, against transformers.

Each begins with the family's tiny model. What transformers refuses is passed over.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.families.table import FAMILY_ROWS
from tests.train.conftest import distance
from tests.train.model_oracle import batch, full_model, load_oracle, make_inputs, oracle, torch
from tests.train.tiny_models import as_in_files, tiny_config
from wgrad.autograd.reference import ReferenceDevice
from wgrad.device.errors import WgradError
from wgrad.train.model.families import FAMILIES
from wgrad.train.model.load_config import parse_model_config
from wgrad.train.model.rope_scaling import ROPE_TYPES

pytestmark = [pytest.mark.oracle, pytest.mark.all]
TOKENS, SEEDS = 37, range(2)
REFUSED = ("rope", "layer_types", "parallel_attn", "factor", "num_kv_shared_layers")  # at some values
WINDOWS, SCALES = (1, 3, 16, 36, 64), (0.3, 0.5, 2.0, 5.0)
SCALED = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "key_multiplier", "scale_emb")
SWITCHES = (
    *("attention_bias", "mlp_bias", "tie_word_embeddings", "use_bias", "use_qkv_bias", "use_parallel_residual", "bias"),
    *("use_post_norm", "multi_query", "parallel_attn", "scale_attn_weights", "enable_bias", "use_sandwich_norm"),
    *("use_attention_gate", "rope_interleave", "mamba_rms_norm", "mamba_norm_before_gate", "linear_allow_neg_eigval"),
    *("qk_layernorm", "use_qk_norm", "scale_attn_by_inverse_layer_idx"),
)
ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "silu")


def without_experts() -> list[str]:
    """Return the architectures whose tiny model has no experts."""
    return [name for name in FAMILIES if parse_model_config(tiny_config(name)).experts is None]


def rope(rng: Random, name: str) -> dict[str, Any]:
    own = FAMILY_ROWS[name].scaling
    kind = own.get("rope_type") or rng.choice(ROPE_TYPES[:-1])
    found: dict[str, Any] = {"rope_type": kind, "factor": rng.choice((1.0, 2.5, 8.0)), **own}
    if kind in ("llama3", "yarn", "longrope"):
        found["original_max_position_embeddings"] = rng.choice((8, 16, 24))
    if kind == "yarn":
        found |= {
            "truncate": rng.random() < 0.5,
            "beta_fast": rng.choice((32.0, 3.0)),
            "mscale": rng.choice((0.0, 0.7)),
        }
        found |= {"mscale_all_dim": 0.9}
    if kind == "llama3":
        found |= {"low_freq_factor": rng.choice((1.0, 2.0)), "high_freq_factor": 4.0}
    if kind == "longrope":
        pairs = parse_model_config(tiny_config(name)).rope.head_dim // 2
        found |= {key: [1 + i * rng.random() for i in range(pairs)] for key in ("short_factor", "long_factor")}
    return found


def changes(rng: Random, name: str) -> dict[str, Any]:
    """Return keys of config.json that differ from those of the family's tiny model."""
    config = tiny_config(name)
    keys = {field.encode_name for field in msgspec.structs.fields(FAMILIES[name].keys)}
    found: dict[str, Any] = {key: rng.random() < 0.5 for key in SWITCHES if key in keys and rng.random() < 0.6}
    found |= {key: rng.choice(SCALES) for key in SCALED if key in keys}
    found |= {key: rng.choice((1e-3, 1e-6)) for key in ("rms_norm_eps", "layer_norm_eps", "norm_eps") if key in keys}
    found |= {"pad_token_id": None}  # whose row has no gradient in torch
    found["vocab_size"] = rng.choice((97, 203))
    if "hidden_act" not in FAMILY_ROWS[name].never_unusual:
        acts = ("hidden_act", "hidden_activation", "activation_function", "activation")
        found |= dict.fromkeys([key for key in acts if key in config], rng.choice(ACTIVATIONS))
    if config.get("sliding_window"):
        found["sliding_window"] = rng.choice(WINDOWS)
    if "layer_types" in config and isinstance(config["layer_types"], list):
        found["layer_types"] = rng.sample(config["layer_types"], len(config["layer_types"]))
    if parse_model_config(config).any_attends:
        least = 64 if parse_model_config(config).position_table else 24  # a table has a row for each token
        found["max_position_embeddings"] = rng.choice((least, 64, 256))
        if config.get("rope_theta"):
            found |= {"rope_theta": rng.choice((50.0, 1e4, 1e6)), "rope_scaling": rope(rng, name)}
    return found


@pytest.mark.parametrize("name", without_experts())
def test_a_random_configuration_equals_transformers(name: str, make_checkpoint: Any) -> None:
    compared = 0
    for seed in SEEDS:
        rng = Random(f"{name}{seed}")
        try:
            folder = make_checkpoint(name, name=str(seed), **(given := changes(rng, name)))
        except WgradError as refusal:
            assert any(key in str(refusal) for key in REFUSED), refusal
            continue
        ids, targets = batch(given["vocab_size"], TOKENS, seed)
        try:
            loaded = load_oracle(folder)
            plain_logits, _, plain = oracle(loaded, torch.float32, ids, targets)
        except (KeyError, ValueError, TypeError, RuntimeError):  # refused
            continue
        logits, loss, true = oracle(loaded, torch.float64, ids, targets)
        model, parameters = full_model(folder, device := ReferenceDevice())
        inputs = make_inputs(device, ids, targets)
        if (tables := model.token_tables(ids.size)) is not None:
            row = np.tile(np.arange(TOKENS, dtype=np.int32), (len(ids), 1))
            tables.write(device, row, np.zeros_like(row))
            inputs.tables = tables
        ours = device.download(model.logits(model.hidden(inputs).data))
        assert distance(ours, logits) <= 5 * distance(plain_logits, logits) + 1e-6, given
        result = model.loss(inputs)
        assert float(result.numpy()[0]) == pytest.approx(loss, rel=1e-5), given
        result.backward()
        most = max(np.abs(value).max() for value in true.values())
        for key, tensor in parameters.tensors.items():
            if key in true and true[key].shape == tensor.shape and np.abs(true[key]).max() > 1e-4 * most:
                assert tensor.gradient is not None
                gradient = as_in_files(key, device.download(tensor.gradient), tiny_config(name))
                error = distance(gradient, true[key])
                assert error <= 10 * distance(plain[key], true[key]) + 1e-5, (key, given)
        compared += 1
    assert compared, name
