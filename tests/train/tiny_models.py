"""config.json and random weights of a tiny model of each family, made without any model library."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.families.common import IDS, VOCAB
from tests.families.row import Row
from tests.families.table import FAMILY_ROWS
from wgrad.train.model.expert_keys import ExpertsFile
from wgrad.train.model.families import FAMILIES
from wgrad.train.model.load_config import parse_model_config
from wgrad.train.model.scored_keys import Ernie45MoeFile, ScoredFile
from wgrad.train.model.weights import constants, weight_specs


def tiny_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    """Return the config.json of a tiny model with odd sizes, none of which divides a tile."""
    kind = FAMILIES[architecture].model_type
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": kind,
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    keys, row = FAMILIES[architecture].keys, FAMILY_ROWS[architecture]
    if issubclass(keys, ExpertsFile):
        config |= {"num_experts_per_tok": 2, "moe_intermediate_size": 36} | IDS
        if not issubclass(keys, ScoredFile | Ernie45MoeFile):
            config |= {"num_experts": 5, "num_local_experts": 5}
    config |= row.tiny
    config |= changes
    for given, other in (("num_experts", "num_local_experts"), ("num_local_experts", "num_experts")):
        if given in changes and other not in changes and other in config:  # which one counts depends on the family
            config[other] = changes[given]
    if "qk_rope_head_dim" in config:  # as in transformers' files
        config["head_dim"] = config["qk_rope_head_dim"]
    row.finish(config)
    return config


def row_of(config: dict[str, Any]) -> Row:
    """Return the row of the family of a config.json."""
    return FAMILY_ROWS[config["architectures"][0]]


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Return random float32 weights, large enough for attention and gradients to be far from trivial."""
    generator = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}
    for spec in weight_specs(parse_model_config(config)):
        value = generator.standard_normal(spec.shape).astype(np.float32)
        if (
            spec.name.endswith((".A_log", ".dt_bias", ".D")) and ".linear_attn." not in spec.name
        ):  # so that a state lasts some tokens
            value *= 0.5
        elif spec.kind == "norm":
            value = 1 + 0.2 * value
        elif spec.kind == "bias":
            value *= 0.3
        else:
            value *= 2.0 / np.sqrt(spec.shape[-1])
        for part, factor in row_of(config).smaller.items():
            value *= factor if part in spec.name else 1.0
        value = as_in_files(spec.name, value, config)
        if "_layernorm." in spec.name and value.ndim == 2:  # StableLM's files have each head's weight by itself
            weights |= {spec.name.replace(".weight", f".norms.{i}.weight"): row for i, row in enumerate(value)}
        else:
            weights[name_in_files(spec.name, config)] = value
    return weights | {
        name: np.array(value, np.float32) for name, value in constants(parse_model_config(config)).items()
    }


def name_in_files(name: str, config: dict[str, Any]) -> str:
    """Return a weight's name in transformers' model."""
    for ours, theirs in row_of(config).names:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def as_in_files(name: str, value: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Return a weight in transformers' layout."""
    turned = row_of(config).turned == value.ndim and ".layers." in name
    return np.ascontiguousarray(value.swapaxes(-1, -2)) if turned else value
