"""Conversion of a GGUF file's hyper-parameters to the config.json of the same model.

Source: github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py, src/llama-model.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from wgrad.device.errors import WgradError
from wgrad.train.files.gguf_fields import GgufFields
from wgrad.train.files.gguf_names import ROPE_FACTORS, ROPE_LONG, ROPE_SHORT
from wgrad.train.files.gguf_traits import FileKey, GgufTraits
from wgrad.train.files.safetensors_files import TensorEntry
from wgrad.train.model.config_file import RopeFile
from wgrad.train.model.expert_keys import ExpertsFile
from wgrad.train.model.families import FAMILIES
from wgrad.train.model.gguf_experts import keys_of_experts
from wgrad.train.model.gguf_latent import keys_of_latent, yarn_of_latent
from wgrad.train.model.gguf_linear import keys_of_linear
from wgrad.train.model.gguf_mamba import keys_of_mamba
from wgrad.train.model.gguf_shared_keys import keys_of_shared
from wgrad.train.model.gguf_windows import WINDOW, keys_of_windows
from wgrad.train.model.rope_scaling import RopeConfig, inverse_frequencies
from wgrad.train.model.weights import EMBEDDING, HEAD

# Llama 3.1 and 3.2. GGUF has only the frequency factors that result from these, as a tensor.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_ORIGINAL = "rope.scaling.original_context_length"


def config_of_gguf(fields: GgufFields, tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Return the config.json of a GGUF file's model.

    Args:
        fields: Metadata of the file.
        tensors: Entries of its tensors, as `read_gguf_entries` returns them.

    Raises:
        WgradError: A key is missing or wrong, or the model is not supported.
    """
    traits, prefix = fields.traits, fields.architecture + "."
    experts = fields.get(prefix + "expert_count", int, 0)
    architecture = _architecture(fields, experts)

    def number(key: str) -> int:
        return fields.needed(prefix + key, int)

    hidden, layers = number("embedding_length"), number("block_count")
    by_layer = traits.sized_layers and fields.is_list(prefix + "attention.head_count")
    listed = fields.whole_numbers(prefix + "attention.head_count") if by_layer else []
    heads = (listed[0] if listed else number("attention.head_count")) if traits.attends else 1
    layers -= (extra := fields.get(prefix + "nextn_predict_layers", int, 0))
    if heads < 1 or hidden < 1:
        raise fields.error(prefix + "attention.head_count", f"must be above 0, got {heads}")
    latent = keys_of_latent(fields, heads)
    width, rotated = _head_widths(architecture, fields, latent, hidden // heads)
    embedding = tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise fields.error("token_embd.weight", "must be a matrix of the file, got none")
    return {
        "architectures": [architecture],
        "model_type": FAMILIES[architecture].model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": _mlp_width(fields, experts),
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": extra,
        "num_attention_heads": heads,
        "num_key_value_heads": _key_heads(fields, heads),
        "head_dim": width,
        "max_position_embeddings": number("context_length"),
        **_epsilon(fields),
        "tie_word_embeddings": HEAD not in tensors,
        "rope_theta": _theta(fields),
        **_rope(architecture, fields, tensors, (width, rotated), latent),
        "partial_rotary_factor": _part(rotated, width),
        **_told(traits, tensors),
        **keys_of_mamba(fields, tensors),
        **keys_of_experts(fields, experts, layers, tensors),
        **keys_of_linear(fields),
        **latent,
        **_variant(fields, tensors, _part(rotated, width), hidden // heads if layers == traits.largest else width),
        **keys_of_windows(fields, layers, _theta(fields)),
        **({"num_attention_heads_per_layer": listed[:layers]} if listed else {}),
        **_gates(tensors, heads),
        **_shared(fields, tensors),
    }


def _architecture(fields: GgufFields, experts: int) -> str:
    """Return the architecture by Hugging Face's name. Several share one in GGUF. experts: number of experts, or 0."""
    name, prefix = fields.architecture, fields.architecture + "."
    of_name = {key: own for key, own in FAMILIES.items() if name in (own.gguf, *dict(own.gguf_others).values())}
    named = {
        key: own
        for key, own in of_name.items()
        if own.keys.some_have_experts or issubclass(own.keys, ExpertsFile) == (experts > 0)
    }
    if not named or experts < 0:
        raise fields.error(prefix + "expert_count", f"must be {'0' if experts else 'above 0'}, got {experts}")
    marked = (
        key
        for key, own in named.items()
        if (own.gguf_key and fields.get(prefix + own.gguf_key, int, 0) > own.gguf_above)
        or (own.gguf_flag and fields.get(prefix + own.gguf_flag, bool, False))
    )
    return next(marked, next(iter(named)))


def _head_widths(architecture: str, fields: GgufFields, latent: dict[str, Any], usual: int) -> tuple[int, int]:
    """Return the numbers of a head, and how many of them are rotated. usual: width if the file states none."""
    prefix = fields.architecture + "."
    width = latent.get("qk_rope_head_dim") or fields.get(prefix + "attention.key_length", int, usual)
    rotated = fields.get(prefix + "rope.dimension_count", int, width) if not fields.traits.unrotated else width
    whole = {} if latent else {"attention.value_length": fields.get(prefix + "attention.value_length", int, width)}
    if not FAMILIES[architecture].keys.partial_rotary or not 0 < rotated < width:
        whole["rope.dimension_count"] = rotated
    for key, value in whole.items():
        if value != width:
            raise WgradError(
                f"{fields.source}: {fields.path}: {prefix}{key} {value} is not supported: only the {width} of a whole "
                "head is"
            )
    return width, rotated


def _mlp_width(fields: GgufFields, experts: int) -> int:
    """Return the width of a plain MLP, or of an expert if no layer has a plain MLP."""
    key = f"{fields.architecture}.feed_forward_length"
    if fields.is_list(key) and (listed := fields.whole_numbers(key)):
        return max(listed)
    return fields.get(key, int) or fields.needed(key.replace(".", ".expert_", 1) if experts else key, int)


def _key_heads(fields: GgufFields, heads: int) -> int:
    """Return the number of key heads. A file may list it by layer, with 0 for layers without attention."""
    key = f"{fields.architecture}.attention.head_count_kv"
    if not fields.is_list(key):
        return fields.get(key, int, heads)
    listed = {*fields.whole_numbers(key)} - {0}
    if fields.traits.shares and listed:
        return max(listed)  # `keys_of_shared` adds the number of each kind of layer
    if len(listed) != 1:
        raise fields.error(key, f"must be the same in all layers with attention, got {sorted(listed)}")
    return listed.pop()


def _epsilon(fields: GgufFields) -> dict[str, float]:
    own = fields.traits.layer_norm
    rms_norm = f"{fields.architecture}.attention.layer_norm_rms_epsilon"
    if fields.traits.or_rms_norm and fields.get(rms_norm, float, 0.0):
        own = ""
    key = "layer_norm_epsilon" if own else "layer_norm_rms_epsilon"
    return {own or "rms_norm_eps": fields.needed(f"{fields.architecture}.attention.{key}", float)}


def _shared(fields: GgufFields, tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Return the config.json keys of models whose layers share attention's keys and values."""
    if not fields.traits.shares:
        return {}
    factors = _factors(fields, tensors, ROPE_FACTORS) if ROPE_FACTORS in tensors else None
    return keys_of_shared(fields, tensors, factors)


def _rope(
    architecture: str,
    fields: GgufFields,
    tensors: Mapping[str, TensorEntry],
    widths: tuple[int, int],
    latent: dict[str, Any],
) -> dict[str, Any]:
    """Return the keys of rotary embeddings. widths: elements of a head, and how many of them are rotated."""
    if fields.traits.shares:
        return {}
    width, rotated = widths
    scaling = yarn_of_latent(fields, _scaling(fields, tensors, width), latent)
    if fields.traits.states_yarn:
        return _mistral3_rope(fields, scaling)
    if fields.traits.unrounded_yarn and scaling is not None:
        scaling["truncate"] = False
    if fields.traits.states_local_rope:
        local = fields.get(f"{fields.architecture}.rope.freq_base_swa", float, _theta(fields))
        turned = fields.get(f"{fields.architecture}.rope.dimension_count_swa", int, rotated)
        full = (scaling or {"rope_type": "default"}) | {"partial_rotary_factor": _part(rotated, width)}
        sliding = {"rope_type": "default", "rope_theta": local, "partial_rotary_factor": _part(turned, width)}
        return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
    if FAMILIES[architecture].gguf_key != WINDOW and not FAMILIES[architecture].keys.default_rope.full_attention:
        scaled_by_default = FAMILIES[architecture].keys.default_rope != RopeFile()
        return {"rope_scaling": scaling or ({"rope_type": "default"} if scaled_by_default else None)}
    sliding = {"rope_type": "default", "rope_theta": _theta(fields)}
    return {"rope_parameters": {"full_attention": scaling or {"rope_type": "default"}, "sliding_attention": sliding}}


def _mistral3_rope(fields: GgufFields, scaling: dict[str, Any] | None) -> dict[str, Any]:
    """Return Mistral 3's keys for rotary embeddings: yarn with the file's numbers, and the scale of late queries."""
    prefix = fields.architecture + "."
    found = {"rope_theta": _theta(fields), **(scaling or {"rope_type": "default"})}
    if found["rope_type"] == "yarn":
        found["beta_fast"] = fields.get(f"{prefix}rope.scaling.yarn_beta_fast", float, 32.0)
        found["beta_slow"] = fields.get(f"{prefix}rope.scaling.yarn_beta_slow", float, 1.0)
        if multiplier := fields.get(f"{prefix}rope.scaling.yarn_log_multiplier", float, 0.0):
            found |= {"mscale": 1.0, "mscale_all_dim": multiplier}
        found["llama_4_scaling_beta"] = fields.get(f"{prefix}attention.temperature_scale", float, 0.0)
    return {"rope_parameters": found, "rope_theta": None, "sliding_window": None}


def _theta(fields: GgufFields) -> float:
    key = fields.architecture + ".rope.freq_base"
    theta = fields.get(key, float, 10_000.0)
    if not 1 < theta <= 1e15:  # the range of config.json's `rope_theta`
        raise fields.error(key, f"must be above 1 and at most 1e15, got {theta:g}")
    return theta


def _part(rotated: int, width: int) -> float:
    """Return a factor with int(width * factor) == rotated."""
    part = 1.0 if rotated == width else rotated / width
    return part if int(width * part) == rotated else math.nextafter(part, 1.0)


def _told(traits: GgufTraits, tensors: Mapping[str, TensorEntry]) -> dict[str, bool]:
    """Return the keys that tensors of the first layer tell."""
    told = {"attention_bias": "self_attn.o_proj.bias", "mlp_bias": "mlp.down_proj.bias"} | traits.told
    return {
        key: ("model.layers.0." + tensor.lstrip("!") in tensors) != tensor.startswith("!")
        for key, tensor in told.items()
    }


def _gates(tensors: Mapping[str, TensorEntry], heads: int) -> dict[str, str]:
    """Return whether Laguna's attention has a gate for each head or for each element, which the rows of one tell."""
    gate = tensors.get("model.layers.0.self_attn.g_proj.weight")
    return {} if gate is None else {"gating": "per-head" if gate.shape[:1] == (heads,) else "per-element"}


def _variant(fields: GgufFields, tensors: Mapping[str, TensorEntry], part: float, scored: int) -> dict[str, Any]:
    """Return the keys that only some architectures have.

    part: share of a head that is rotated. scored: scores are scaled by 1 / sqrt(scored).
    """
    traits, prefix = fields.traits, fields.architecture + "."
    found = traits.constants | {key.key: _stated(fields, key) for key in traits.keys}
    found |= dict(zip(traits.rope_names, (_theta(fields), part)))
    if traits.multi_query or traits.counts_norms:
        heads = _key_heads(fields, fields.needed(prefix + "attention.head_count", int))
        norms = 2 if "model.layers.0.ln_attn.weight" in tensors else 1
        counted = {"num_kv_heads": heads, "num_ln_in_parallel_attn": norms}
        found |= {"multi_query": heads == 1} if traits.multi_query else counted
    if traits.largest is not None:
        found["query_pre_attn_scalar"] = scored
    if traits.windowed is not None:
        large = fields.needed(prefix + "block_count", int) == traits.windowed
        found["sliding_window"] = fields.get(prefix + WINDOW, int, 4096) if large else None
        found["sliding_window_pattern"] = traits.one_full_of
    if traits.scaled:
        found["attention_multiplier"] = fields.get(prefix + "attention.scale", float, scored**-0.5)
    return found


def _stated(fields: GgufFields, key: FileKey) -> Any:
    """Return the value of a key of config.json that a key of the file states."""
    name = f"{fields.architecture}.{key.stated}"
    value = fields.needed(name, key.kind) if key.needed else fields.get(name, key.kind, key.default)
    return value or None if key.zero_is_none else value


def _scaling(fields: GgufFields, tensors: Mapping[str, TensorEntry], width: int) -> dict[str, Any] | None:
    """Return rope_scaling of config.json, or None."""
    prefix = fields.architecture + ".rope.scaling."
    kind = fields.get(prefix + "type", str, "none")
    if ROPE_LONG in tensors and ROPE_SHORT in tensors:
        both = {"long_factor": ROPE_LONG, "short_factor": ROPE_SHORT}
        listed = {key: _factors(fields, tensors, tensor).tolist() for key, tensor in both.items()}
        factor = fields.get(prefix + "attn_factor", float)
        return {"rope_type": "longrope", "attention_factor": factor, **listed}
    if ROPE_FACTORS in tensors:
        return _by_factors(fields, _factors(fields, tensors, ROPE_FACTORS), width)
    factor = fields.get(prefix + "factor", float) or fields.get(fields.architecture + ".rope.scale_linear", float)
    if factor and prefix + "type" not in fields:
        return {"rope_type": "linear", "factor": factor}  # llama.cpp's default type
    if kind == "none":
        return None
    if kind == "yarn" and fields.get(prefix + "attn_factor", float, 1.0) != 1.0:
        raise fields.error(prefix + "attn_factor", "must be 1 with yarn: another is not supported")
    found: dict[str, Any] = {"rope_type": kind, "factor": fields.needed(prefix + "factor", float)}
    original = fields.get(f"{fields.architecture}.{_ORIGINAL}", int)
    return found if original is None else found | {"original_max_position_embeddings": original}


def _factors(fields: GgufFields, tensors: Mapping[str, TensorEntry], name: str) -> np.ndarray:
    """Return a tensor of frequency factors, float32 [pairs]."""
    entry = tensors[name]
    if entry.dtype != "F32" or len(entry.shape) != 1:
        raise fields.error(name, f"must be a list in F32, got {entry.dtype} {list(entry.shape)}")
    return entry.finite_array()


def _by_factors(fields: GgufFields, factors: np.ndarray, width: int) -> dict[str, Any]:
    """Return rope_scaling for a divisor of each pair's frequency: Llama 3's type if it results in the same divisors."""
    theta = _theta(fields)
    if factors.shape != (width // 2,):
        raise fields.error(
            ROPE_FACTORS, f"must have a number for each of {width // 2} pairs, got {list(factors.shape)}"
        )
    largest = max(1.0, round(float(factors.max()), 4))
    llama3 = RopeConfig(width, theta, "llama3", largest, **dict[str, Any](_LLAMA3))
    if np.allclose(inverse_frequencies(RopeConfig(width, theta)) / inverse_frequencies(llama3), factors, rtol=1e-5):
        return {"rope_type": "llama3", "factor": largest, **_LLAMA3}
    listed = factors.tolist()
    return {"rope_type": "longrope", "factor": 1.0, "short_factor": listed, "long_factor": listed}
