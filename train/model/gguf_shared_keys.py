"""GGUF files of Gemma 3n and 4, whose layers share attention's keys and values and have several shapes.

Source: github.com/ggml-org/llama.cpp, its converter's Gemma3NModel and Gemma4Model, src/models/gemma3n.cpp, gemma4.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

from wgrad.train.files.gguf_fields import GgufFields
from wgrad.train.files.gguf_files import GgufEntry
from wgrad.train.files.safetensors_files import TensorEntry
from wgrad.train.model.altup import LEFT
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.per_layer import PROJECTION, TABLE
from wgrad.train.model.rope_scaling import RopeConfig
from wgrad.train.model.weights import WeightSpec

# llama.cpp's fixed values for Gemma 3n, which override a file's.
_OWN_LAYERS, _STREAMS, _RANK, _WIDTH, _CAP = 20, 4, 64, 256, 30.0
_SPARSE = 0.95, 10  # sparsity, and the number of first layers that have it
_NEVER = 1e30  # divisor of the frequency of pairs that are not rotated
_STILL = 1e20  # divisors from here on mean that a pair is not rotated
_KINDS = ("full_attention", "sliding_attention")
_STACKS = ("model.altup_projections", "model.altup_unembed_projections")
# Weights to which llama.cpp applies no adapter.
UNADAPTED = (*_STACKS, PROJECTION, "altup.modality_router")


# ---- tensors ---------------------------------------------------------------------------------------
def shared_specs(config: ModelConfig, specs: list[WeightSpec]) -> list[WeightSpec]:
    """Return the tensors as they are in a file.

    AltUp's projections are stacked, per-layer embeddings have a row for every token, and Gemma 3n has projections of
    keys and values even in layers that use another layer's.
    """
    found = []
    for spec in specs:
        stack = stack_of(spec.name)
        if spec.name == TABLE:
            found.append(replace(spec, shape=(config.vocab_size, spec.shape[1])))
        elif stack == spec.name:
            found.append(spec)
        elif config.altup is not None and stack not in (other.name for other in found):
            found.append(replace(spec, name=stack, shape=(config.altup.streams - 1, *spec.shape)))
    return found + (_unused(config) if config.altup is not None else [])


def stack_of(name: str) -> str:
    """Return the name of the stacked tensor that contains a tensor, or its own name if it is not stacked."""
    stack = next((stack for stack in _STACKS if name.startswith(f"{stack}.")), "")
    return f"{stack}.weight" if stack else name


def _unused(config: ModelConfig) -> list[WeightSpec]:
    """Return the tensors of keys and values that files have for layers that use another layer's."""
    size, found = config.head_dim, []
    for layer in range(config.num_hidden_layers):
        if not config.keys_of(layer):
            prefix = f"model.layers.{layer}.self_attn."
            for part in "kv":
                shape = (config.kv_size_of(layer), config.hidden_size)
                found.append(WeightSpec(f"{prefix}{part}_proj.weight", shape, "projection"))
            found.append(WeightSpec(f"{prefix}k_norm.weight", (size,), "norm"))
    return found


def shared_value(spec: WeightSpec, specs: Mapping[str, WeightSpec], value: Any) -> np.ndarray | None:
    """Return the value of a tensor of `shared_specs` that the model does not have as such; None for other tensors.

    Args:
        spec: A tensor of the file.
        specs: The model's tensors by name.
        value: Returns the array of one of the model's tensors.
    """
    stack = spec.name.removesuffix(".weight")
    if stack in _STACKS:
        return np.stack([value(specs[f"{stack}.{i}.weight"]) for i in range(spec.shape[0])])
    if spec.name == TABLE and spec.shape != specs[TABLE].shape:
        table = value(specs[TABLE])[: spec.shape[0]]
        # The model uses the first row for tokens that the table does not have.
        return np.concatenate([table, np.repeat(table[:1], spec.shape[0] - len(table), 0)])
    return None if spec.name in specs else np.zeros(spec.shape, np.float32)


def table_of_model(entries: dict[str, TensorEntry], config: ModelConfig) -> None:
    """Cut the rows of per-layer embeddings that the config.json next to a GGUF file does not have."""
    entry, own = entries.get(TABLE), config.per_layer
    if isinstance(entry, GgufEntry) and own is not None and entry.shape[0] > own.vocabulary > 0:
        size = entry.size // entry.shape[0] * own.vocabulary
        entries[TABLE] = replace(entry, shape=(own.vocabulary, *entry.shape[1:]), size=size)


# ---- keys ------------------------------------------------------------------------------------------
def _slides(config: ModelConfig) -> list[bool]:
    return [window > 0 for window in config.windows]


def _of_kind(config: ModelConfig, sliding: bool) -> int:
    """Return the head size of layers with (sliding) or without a window; if there are none, of the first layer."""
    widths = {slides: config.head_dim_of(i) for i, slides in enumerate(_slides(config))}
    return widths.get(sliding, config.head_dim_of(0))


def write_shared(writer: Any, config: ModelConfig) -> None:
    """Write the keys of properties that differ by layer, and those of the two architectures."""
    full, local = _of_kind(config, False), _of_kind(config, True)
    layers = range(config.num_hidden_layers)
    writer.add_feed_forward_length([config.mlp_width_of(layer) for layer in layers])
    writer.add_head_count_kv([config.kv_heads_of(layer) for layer in layers])
    for add in (writer.add_key_length, writer.add_value_length):
        add(full)
    writer.add_shared_kv_layers(sum(config.kv_source(layer) != layer for layer in layers))
    writer.add_embedding_length_per_layer_input(config.per_layer.width if config.per_layer else 0)
    writer.add_sliding_window(max(config.windows))
    writer.add_sliding_window_pattern(_slides(config))
    writer.add_final_logit_softcapping(config.logit_softcap)
    assert config.local_rope is not None
    writer.add_rope_freq_base_swa(config.local_rope.theta)
    if config.altup is None:
        for add in (writer.add_key_length_swa, writer.add_value_length_swa, writer.add_rope_dimension_count_swa):
            add(local)
        return
    writer.add_altup_active_idx(0)
    writer.add_altup_num_inputs(config.altup.streams)
    writer.add_activation_sparsity_scale(
        [NormalDist().inv_cdf(share) if share else -math.inf for share in config.altup.sparsity]
    )


def frequency_factors(rope: RopeConfig) -> np.ndarray:
    """Return the divisors of Gemma 4's frequencies in layers without a window, float32 [pairs]."""
    factors = np.full(rope.head_dim // 2, _NEVER, np.float32)
    factors[: rope.turned if rope.type == "proportional" else None] = rope.factor
    return factors


def without_shared_place(config: ModelConfig) -> Iterator[str]:
    """Yield the properties that GGUF has no key for and that differ from llama.cpp's fixed values."""
    slides, layers = _slides(config), range(config.num_hidden_layers)
    own = sum(config.kv_source(layer) == layer for layer in layers)
    if any(config.kv_source(layer) != own - 1 - slides[layer] for layer in layers[own:]):
        yield "layers that use the keys of others than the last two with their own"
    if len({config.windows[layer] for layer in layers if slides[layer]}) > 1:
        yield "sliding windows of several sizes"
    if config.local_rope != RopeConfig(_of_kind(config, True), config.local_rope.theta if config.local_rope else 0.0):
        yield "scaled rotary embeddings in sliding layers"
    if len({(slides[layer], config.kv_heads_of(layer)) for layer in layers}) > len({*slides}):
        yield "layers of one kind with other numbers of heads"
    if config.altup is None:
        return
    if own != min(_OWN_LAYERS, len(layers)):
        yield f"keys and values shared by other layers than those from {_OWN_LAYERS} on"
    if slides != [(layer + 1) % 5 != 0 for layer in layers]:
        yield f"a sliding window in other layers than {config.gguf} has it"
    sizes = (config.altup.streams, config.altup.rank, config.per_layer.width if config.per_layer else 0)
    if sizes != (_STREAMS, _RANK, _WIDTH):
        yield f"AltUp of {sizes[0]} streams, LAuReL of rank {sizes[1]} and per-layer embeddings of {sizes[2]} numbers"
    share, count = _SPARSE
    if config.altup.sparsity != tuple(share if layer < count else 0.0 for layer in layers):
        yield "other sparse activations"
    if config.logit_softcap != _CAP:
        yield f"logits capped at {config.logit_softcap:g}"
    if len({config.mlp_width_of(layer) for layer in layers}) > 1:
        yield "MLPs of several widths"


def keys_of_shared(
    fields: GgufFields, tensors: Mapping[str, TensorEntry], factors: np.ndarray | None
) -> dict[str, Any]:
    """Return the config.json keys. factors: the file's divisors of frequencies in layers without a window, or None."""
    altup, prefix = fields.traits.altup, fields.architecture + "."
    layers, full = fields.needed(prefix + "block_count", int), fields.needed(prefix + "attention.key_length", int)
    slides = _pattern(fields, layers)
    shared = fields.get(prefix + "attention.shared_kv_layers", int, max(layers - _OWN_LAYERS, 0) * altup)
    widths = _listed(fields, prefix + "feed_forward_length", layers)
    table = tensors.get(TABLE)
    found: dict[str, Any] = {
        "layer_types": [_KINDS[slide] for slide in slides],
        "sliding_window": fields.needed(prefix + "attention.sliding_window", int),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": fields.get(
            prefix + "embedding_length_per_layer_input", int, _WIDTH if altup else 0
        ),
        "final_logit_softcapping": fields.get(prefix + "final_logit_softcapping", float, _CAP) or None,
        "rope_parameters": _ropes(fields, full, factors),
        "rope_scaling": None,
    }
    if table is not None and len(table.shape) == 2:
        found["vocab_size_per_layer_input"] = table.shape[0]
    if altup:
        left = tensors.get(f"model.layers.0.{LEFT}.weight")
        return found | {
            "intermediate_size": widths,
            "altup_num_inputs": fields.get(prefix + "altup.num_inputs", int, _STREAMS),
            "laurel_rank": left.shape[0] if left is not None else _RANK,
            "activation_sparsity_pattern": _shares(fields, layers),
        }
    local = fields.needed(prefix + "attention.key_length_swa", int)
    if (turned := fields.get(prefix + "rope.dimension_count_swa", int, local)) != local:
        raise fields.error(prefix + "rope.dimension_count_swa", f"must be {local}, a whole head, got {turned}")
    return found | {
        "head_dim": local,
        "global_head_dim": full,
        **_heads_of_gemma_4(fields, tensors, slides, layers - shared),
        **_mlps_of_gemma_4(fields, widths, shared),
    }


def _heads_of_gemma_4(
    fields: GgufFields, tensors: Mapping[str, TensorEntry], slides: list[bool], own: int
) -> dict[str, Any]:
    """Return the keys for heads of keys and values. own: number of layers that have keys and values of their own."""
    key = f"{fields.architecture}.attention.head_count_kv"
    heads = _listed(fields, key, len(slides))
    of_kind = dict(zip(slides, heads))
    usual = of_kind.get(True, heads[0])
    if any(count != of_kind[slide] for slide, count in zip(slides, heads)):
        raise fields.error(key, f"must be the same in layers of one kind, got {heads}")
    valueless = [f"model.layers.{i}.self_attn.v_proj.weight" not in tensors for i in range(own)]
    if valueless != [any(valueless) and not slide for slide in slides[:own]]:
        raise fields.error(
            "attn_v.weight", "must be there in all layers with a window, and in all or none of the others"
        )
    if not any(valueless) and of_kind.get(False, usual) != usual:
        raise fields.error(key, f"must be the same in all layers with values, got {heads}")
    return {
        "num_key_value_heads": usual,
        "num_global_key_value_heads": of_kind.get(False, usual) if any(valueless) else None,
        "attention_k_eq_v": any(valueless),
    }


def _mlps_of_gemma_4(fields: GgufFields, widths: list[int], shared: int) -> dict[str, Any]:
    """Return the keys for the widths of MLPs. shared: number of last layers that use another layer's keys."""
    width, plain = widths[0], len(widths) - shared
    wide = [width if layer < plain else 2 * width for layer in range(len(widths))]
    if widths not in ([width] * len(widths), wide):
        raise fields.error(
            f"{fields.architecture}.feed_forward_length",
            f"must be {width}, or twice that in the last {shared} layers",
        )
    return {"intermediate_size": width, "use_double_wide_mlp": widths == wide and shared > 0}


def _listed(fields: GgufFields, key: str, layers: int) -> list[int]:
    """Return the number of each layer. A file may state one for all layers."""
    if not fields.is_list(key):
        return [fields.needed(key, int)] * layers
    found = fields.whole_numbers(key)
    if len(found) != layers:
        raise fields.error(key, f"must have {layers} numbers, one of each layer, got {len(found)}")
    return found


def _pattern(fields: GgufFields, layers: int) -> list[bool]:
    """Return for each layer whether it has a sliding window."""
    key = f"{fields.architecture}.attention.sliding_window_pattern"
    if fields.is_list(key) or not fields.traits.altup:
        return [bool(slide) for slide in _listed(fields, key, layers)]
    every = fields.get(key, int, 5)
    return [bool((layer + 1) % every) for layer in range(layers)]


def _ropes(fields: GgufFields, width: int, factors: np.ndarray | None) -> dict[str, Any]:
    """Return rope_parameters of config.json. width: head size of layers without a window."""
    prefix = fields.architecture + ".rope."
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": fields.get(prefix + "freq_base", float, 10_000.0)}
    if factors is not None:
        turned = int((factors < _STILL).sum())
        if factors.shape != (width // 2,) or len({*factors[:turned].tolist()}) > 1 or (factors[turned:] < _STILL).any():
            raise fields.error(
                "rope_freqs.weight", f"must have one factor for the first of {width // 2} pairs, 1e30 of others"
            )
        part = 2 * turned / width
        part = part if int(part * width // 2) == turned else math.nextafter(part, 1.0)
        full |= {"rope_type": "proportional", "partial_rotary_factor": part}
        full["factor"] = float(factors[0]) if turned else 1.0
    theta = fields.get(prefix + "freq_base_swa", float, 10_000.0)
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": theta}}


def _shares(fields: GgufFields, layers: int) -> list[float]:
    """Return for each layer the share of the gate's values that become 0."""
    scales = fields.numbers(f"{fields.architecture}.activation_sparsity_scale")
    if not scales:
        share, count = _SPARSE
        return [share if layer < count else 0.0 for layer in range(layers)]
    return [round(NormalDist().cdf(max(float(scale), -9.0)), 6) for scale in scales]
