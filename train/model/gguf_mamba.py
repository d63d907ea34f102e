"""Layers with Mamba in GGUF files: their tensors, which differ in shape and values, and their keys.

Files of `falcon-h1` have no keys for its multipliers, which are multiplied into the weights instead.
Source: github.com/ggml-org/llama.cpp, its converter's Mamba2Model, GraniteHybridModel, NemotronHModel, FalconH1Model,
MambaModel, JambaModel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wgrad.device.errors import WgradError
from wgrad.train.files.gguf_fields import GgufFields
from wgrad.train.files.safetensors_files import TensorEntry
from wgrad.train.model.mamba_sizes import MAMBA_LAYER, UNLIMITED, Mamba1, Mamba2
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.weights import EMBEDDING, HEAD, projection_shapes

_ROTATES = "rope.scaling.finetuned"  # whether layers have rotary embeddings, as Bamba's; default true
# Transformers' lower limit of time steps for Nemotron-H. llama.cpp has none, but so short a step changes little.
_LEAST_STEP = 1e-3


# ---- tensors ---------------------------------------------------------------------------------------
def mamba_shape(config: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in GGUF of a tensor of a layer with Mamba-2; `shape` for other tensors."""
    c = config.linear
    if not isinstance(c, Mamba2) or not _is_part(c, name):
        return shape
    if name.endswith((".A_log", ".D")):
        return c.heads, 1
    return (c.groups, c.inner // c.groups) if name.endswith(".norm.weight") else shape


def _is_part(c: Mamba2, name: str) -> bool:
    return name.partition(".layers.")[2].partition(".")[2] in c.others


def mamba_to_gguf(config: ModelConfig, name: str, value: np.ndarray) -> np.ndarray:
    """Convert a weight, or an adapter's matrix with the same rows, to GGUF's values. name: the weight's."""
    if not config.gguf_traits.mamba:
        return value
    if name.endswith(".A_log"):
        return np.asarray(-np.exp(value))
    factors = multiplier(config, name)
    return value if factors is None else value * factors.reshape(-1, *[1] * (value.ndim - 1))


def multiplier(config: ModelConfig, name: str) -> np.ndarray | None:
    """Return the factors of a weight's rows in GGUF, float32 [rows] or [1], or None if they are unchanged."""
    c = config.linear
    if not config.gguf_traits.multiplied or not isinstance(c, Mamba2) or not name.endswith(".weight"):
        return None
    if name in (EMBEDDING, HEAD):
        return np.array([config.embedding_scale if name == EMBEDDING else config.logit_scale], np.float32)
    part = name.partition(".layers.")[2].partition(".")[2].removesuffix(".weight")
    if part == c.in_proj:
        return np.repeat(np.array(c.scales, np.float32), (c.inner, *c.parts, c.heads)) * np.float32(c.in_scale)
    into = config.attention_in_scale
    scales = {
        f"{config.attention}.q_proj": into,
        f"{config.attention}.k_proj": into * config.score_scale * config.head_dim**0.5,
        f"{config.attention}.v_proj": into,
        config.o_proj: config.attention_out_scale,
        c.out_proj: c.out_scale,
        config.gate_proj: config.gate_scale,
        config.down_proj: config.down_scale,
    }
    return np.array([scales[part]], np.float32) if part in scales else None


def plain_keys(config: ModelConfig) -> dict[str, Any]:
    """Return the keys for a config.json next to a GGUF file: multipliers of 1, since the weights contain them."""
    if not config.gguf_traits.multiplied:
        return {}
    keys = ("key", "embedding", "lm_head", "attention_in", "attention_out", "ssm_in", "ssm_out")
    lists = {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5}
    return dict.fromkeys((f"{key}_multiplier" for key in keys), 1.0) | lists


def check_multipliers(config: ModelConfig, folder: Path) -> None:
    """Raise WgradError if the config.json next to a GGUF file has multipliers, which its weights already contain."""
    layer = [f"model.layers.0.{module}.weight" for module in projection_shapes(config, 0)]
    for name in (EMBEDDING, HEAD, *layer):
        factors = multiplier(config, name)
        if factors is not None and not np.allclose(factors, 1, rtol=1e-6):
            raise WgradError(
                f"--model: {folder} has a GGUF file, whose weights have Falcon-H1's multipliers already, and a "
                "config.json with multipliers: give the GGUF file by itself"
            )


def restored(name: str, value: np.ndarray) -> np.ndarray:
    """Convert a small tensor of GGUF back to Hugging Face's values."""
    with np.errstate(all="ignore"):  # logarithms that do not exist become NaN, which is refused later
        return np.asarray(np.log(-value)) if name.endswith(".A_log") else value


# ---- keys ------------------------------------------------------------------------------------------
def write_mamba(writer: Any, config: ModelConfig) -> None:
    """Write the keys of Mamba, and those of the families that use it."""
    c = config.linear
    if not isinstance(c, Mamba1 | Mamba2):
        return
    writer.add_ssm_conv_kernel(c.width)
    writer.add_ssm_state_size(c.state_dim)
    writer.add_ssm_inner_size(c.inner)
    if isinstance(c, Mamba1):
        writer.add_ssm_time_step_rank(c.rank)
        if c.norms_of_parts and not c.norm_weights:
            writer.add_ssm_dt_b_c_rms(True)
        return
    writer.add_ssm_group_count(c.groups)
    writer.add_ssm_time_step_rank(c.heads)
    if config.gguf_traits.one_mixer:
        writer.add_layer_norm_eps(config.rms_norm_eps)  # llama.cpp requires it but does not use it
    if config.gguf_traits.states_rotation:
        writer.add_rope_scaling_finetuned(False)


def key_heads(config: ModelConfig) -> list[int]:
    """Return the number of key heads of each layer, 0 without attention."""
    return [config.num_key_value_heads if config.attends(i) else 0 for i in range(config.num_hidden_layers)]


def mlp_lengths(config: ModelConfig) -> int | list[int]:
    """Return the width of the MLPs, or a list with the width in each layer if some have none (0)."""
    if not config.mlp_layers:
        return config.intermediate_size
    if not any(config.mlp_layers):
        return 0
    width = config.intermediate_size if config.experts is None else config.experts.width
    return [width if layer else 0 for layer in config.mlp_layers]


def without_mamba_place(config: ModelConfig) -> Iterator[str]:
    """Yield the properties of a model with Mamba that GGUF cannot hold or llama.cpp computes differently."""
    c = config.linear
    if not isinstance(c, Mamba1 | Mamba2):
        return
    if not c.conv_bias:
        yield "convolutions without a bias"
    if config.gguf_traits.doubled and c.inner != 2 * config.hidden_size:
        yield f"layers with Mamba of {c.inner} numbers, not twice the {config.hidden_size} of the stream"
    if isinstance(c, Mamba1):
        if c.proj_bias:
            yield "biases of projections"
        return
    if c.in_bias or c.out_bias or config.qkv_bias or config.o_bias or config.mlp_bias:
        yield "biases of projections"
    if c.norm and c.norm_first:
        yield "a norm before the gate (mamba_norm_before_gate)"
    if config.experts is not None and config.mlp_layers and config.mlp_layers != config.experts.layers:
        yield "MLPs next to layers with experts"
    low, high = c.limits
    if low > _LEAST_STEP or high != UNLIMITED[1]:
        yield f"time steps limited to {low:g} to {high:g}"
    if config.gguf_traits.multiplied and config.tie_word_embeddings and config.embedding_scale != config.logit_scale:
        yield "one matrix for embedding and head, with multipliers of their own"


def keys_of_mamba(fields: GgufFields, tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Return the config.json keys of Mamba; {} if the model has none."""
    traits, prefix = fields.traits, fields.architecture + "."
    if not traits.mamba:
        return {}
    if traits.first_mamba:
        return _keys_of_mamba1(fields, tensors)
    state, groups, inner, heads = (
        fields.needed(f"{prefix}ssm.{key}", int)
        for key in ("state_size", "group_count", "inner_size", "time_step_rank")
    )
    width, hidden = fields.needed(prefix + "ssm.conv_kernel", int), fields.needed(prefix + "embedding_length", int)
    if heads < 1 or inner % heads:
        raise fields.error(prefix + "ssm.inner_size", f"must be a multiple of {heads}, the heads, got {inner}")
    biased = any(tensor.endswith(".conv1d.bias") for tensor in tensors)
    found: dict[str, Any] = dict(zip(traits.mamba, (state, groups, heads, inner // heads, width, biased)))
    if traits.one_mixer:
        found |= {"layers_block_type": _kinds_of_nemotron(fields), "time_step_min": 0.0}
    if traits.one_mixer or not traits.attends:
        found["layer_norm_epsilon"] = fields.needed(prefix + "attention.layer_norm_rms_epsilon", float)
        return found if traits.attends else found | {"expand": _expand_of(inner, hidden)}
    if traits.multiplied:
        normed = any(tensor.endswith(".mamba.norm.weight") for tensor in tensors)
        return found | {"mamba_d_ssm": inner, "mamba_rms_norm": normed, "mamba_norm_before_gate": False}
    if fields.get(prefix + _ROTATES, bool, True):
        raise fields.error(prefix + _ROTATES, "must be false: files of Bamba are not read, use safetensors")
    attends = [count > 0 for count in fields.whole_numbers(prefix + "attention.head_count_kv")]
    return found | {
        "mamba_expand": _expand_of(inner, hidden),
        "layer_types": ["attention" if layer else MAMBA_LAYER for layer in attends],
        "num_local_experts": fields.get(prefix + "expert_count", int, 0),
        # With experts, `keys_of_experts` replaces this one.
        "shared_intermediate_size": fields.get(prefix + "feed_forward_length", int, 1),
    }


def _keys_of_mamba1(fields: GgufFields, tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Return the config.json keys of Mamba-1, and those that say which layers of Jamba have attention and experts."""
    traits, prefix = fields.traits, fields.architecture + "."
    state, rank, inner, width = (
        fields.needed(f"{prefix}ssm.{key}", int)
        for key in ("state_size", "time_step_rank", "inner_size", "conv_kernel")
    )
    biased = any(tensor.endswith(".conv1d.bias") for tensor in tensors)
    found: dict[str, Any] = dict(zip(traits.mamba, (state, rank, width, biased)))
    if not traits.attends:
        epsilon = fields.needed(prefix + "attention.layer_norm_rms_epsilon", float)
        return found | {"layer_norm_epsilon": epsilon, "intermediate_size": inner}
    layers, hidden = (fields.needed(prefix + key, int) for key in ("block_count", "embedding_length"))
    if hidden < 1 or inner % hidden:
        raise fields.error(prefix + "ssm.inner_size", f"must be a multiple of {hidden}, the embedding's, got {inner}")
    heads = prefix + "attention.head_count_kv"
    attends = [count > 0 for count in fields.whole_numbers(heads)] if fields.is_list(heads) else [True] * layers
    routed = [f"model.layers.{i}.feed_forward.router.weight" in tensors for i in range(layers)]
    for kind, own, key in (("attn", attends, heads), ("expert", routed, prefix + "expert_count")):
        if (place := _period_of(own)) is None:
            found_in = [i for i, marked in enumerate(own) if marked]
            raise fields.error(key, f"must be above 0 at one of every N layers, got layers {found_in} of {layers}")
        found |= {f"{kind}_layer_period": place[0], f"{kind}_layer_offset": place[1]}
    return found | {"mamba_expand": inner // hidden, "num_local_experts": 0}


def _period_of(layers: list[bool]) -> tuple[int, int] | None:
    """Return (N, i) if exactly the layers i, i + N, ... are marked; None if there is no such N."""
    for period in range(1, len(layers) + 2):
        for offset in range(period):
            if layers == [i % period == offset for i in range(len(layers))]:
                return period, offset
    return None


def _expand_of(inner: int, hidden: int) -> float:
    """Return a factor with int(factor * hidden) == inner."""
    expand = inner / hidden
    return expand if int(expand * hidden) == inner else math.nextafter(expand, math.inf)


def _kinds_of_nemotron(fields: GgufFields) -> list[str]:
    """Return the kind of each layer: attention, moe or mlp, or mamba."""
    prefix = fields.architecture + "."
    own = fields.needed(prefix + "block_count", int) - fields.get(prefix + "nextn_predict_layers", int, 0)
    keys = fields.whole_numbers(prefix + "attention.head_count_kv")[:own]
    widths = fields.whole_numbers(prefix + "feed_forward_length")[:own]
    if len(keys) != len(widths) or len(set(widths) - {0}) > 1:
        raise fields.error(prefix + "feed_forward_length", f"must be one width, or 0, for each of {len(keys)} layers")
    of_mlp = "moe" if fields.traits.expert_keys else "mlp"
    return ["attention" if heads else of_mlp if width else MAMBA_LAYER for heads, width in zip(keys, widths)]
