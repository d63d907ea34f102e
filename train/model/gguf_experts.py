"""Experts in GGUF files, where gate and up of all experts are two separate tensors.

Source: github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py, src/llama-model.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from wgrad.train.files.gguf_fields import GgufFields
from wgrad.train.files.gguf_files import require_gguf
from wgrad.train.files.gguf_names import ARCHITECTURES, gguf_name
from wgrad.train.files.safetensors_files import TensorEntry
from wgrad.train.model.experts import DOWN, EXPERTS, GATE_UP
from wgrad.train.model.gguf_latent import kv_b_rows, shape_by_head
from wgrad.train.model.gguf_linear import BY_HEAD, gguf_shape, rows_by_head
from wgrad.train.model.gguf_llama4 import keys_of_llama4, write_llama4
from wgrad.train.model.gguf_scored import (
    keys_by_shared_width,
    keys_of_averaged,
    keys_of_deepseek2,
    keys_of_ernie,
    keys_of_gemma4,
    keys_of_nemotron,
    keys_of_scored,
    keys_of_softmax,
    without_scored_place,
    write_scored,
)
from wgrad.train.model.gguf_shared_keys import shared_specs, shared_value, stack_of
from wgrad.train.model.linear_attention import LinearAttention
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.weights import XIELU, WeightSpec, weight_specs

_ENDINGS = (".weight", ".bias", ".scale", ".ssm_a", ".ssm_d", ".ffn_norm")
HALVES = ("gate_proj", "up_proj")
SHARED = "mlp.shared_expert"
FUSED_MLP = ("shared_mlp.input_linear", "shared_mlp.output_linear")  # an MLP whose gate and up GGUF splits
EXPERT_KEYS = {  # of config.json, by `GgufTraits.expert_keys`
    "block": keys_of_gemma4,
    "scored": keys_of_scored,
    "latent": keys_of_nemotron,
    "by_width": keys_of_ernie,
    "gated": keys_of_deepseek2,
    "softmax": keys_of_softmax,
    "every_nth": keys_of_llama4,
    "by_shared_width": keys_by_shared_width,
    "averaged": keys_of_averaged,
}


def gguf_specs(config: ModelConfig) -> list[WeightSpec]:
    """Return the model's tensors as they are split and shaped in a GGUF file, with Hugging Face's names."""
    found = []
    for spec in weight_specs(config):
        if spec.name.endswith(XIELU):  # stored as a key instead
            continue
        parts = parts_in_gguf(config, spec.name, spec.shape)
        for name, rows in parts.items():
            found.append(replace(spec, name=name, shape=shape_by_head(config, name, _with_rows(spec, len(rows)))))
        if not parts:
            found.append(replace(spec, shape=gguf_shape(config, spec.name, spec.shape)))
    return shared_specs(config, found) if config.kv_sources else found


def _with_rows(spec: WeightSpec, rows: int) -> tuple[int, ...]:
    shape = list(spec.shape)
    shape[rows_axis(spec.name)] = rows
    return tuple(shape)


def rows_axis(name: str) -> int:
    """Return the axis of the rows of a weight or bias, counted from the last."""
    return -1 if name.endswith("_bias") else -2


def parts_in_gguf(config: ModelConfig, name: str, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return the rows of a weight that each of its tensors in GGUF has, by the tensors' names in Hugging Face's style.

    The result is {} if GGUF has the weight as a single tensor with its own name.
    """
    if of_heads := kv_b_rows(config, name):
        return of_heads
    fused, stem = f"{FUSED_MLP[0]}.weight", name.removesuffix("_bias")
    rows, ending = np.arange(shape[rows_axis(name)] if len(shape) > 1 else 0), ".bias" if stem != name else ""
    if name.endswith(BY_HEAD):
        assert isinstance(config.linear, LinearAttention)
        owner = name.removesuffix(BY_HEAD)
        return {f"{owner}linear_attn.{part}.weight": own for part, own in rows_by_head(config.linear).items()}
    if stem.endswith(f"{EXPERTS}.{DOWN}") and ending:
        return {stem + ending: rows}
    if stem.endswith(f"{EXPERTS}.{GATE_UP}"):
        if config.experts is not None and config.experts.norms is not None:  # Gemma 4: GGUF keeps gate and up fused
            return {}
        names = [stem.removesuffix(GATE_UP) + half + ending for half in HALVES]
        if config.experts is not None and config.experts.interleaved:
            return dict(zip(names, (rows[::2], rows[1::2])))
    elif config.gguf_traits.fused_shared:
        return {}
    elif name.endswith(f"{FUSED_MLP[1]}.weight"):
        return {name.replace(FUSED_MLP[1], f"{'mlp' if config.experts is None else SHARED}.{DOWN}"): rows}
    elif name.endswith(fused):
        owner = "mlp" if config.experts is None else SHARED
        names = [f"{name.removesuffix(fused)}{owner}.{half}.weight" for half in HALVES]
    else:
        return {}
    return dict(zip(names, np.split(rows, 2)))


def by_parts(config: ModelConfig, value: Callable[[WeightSpec], np.ndarray]) -> Callable[[WeightSpec], np.ndarray]:
    """Return a function like `value` for the tensors of `gguf_specs`, which should be called in their order.

    value: returns the array of one of the model's own tensors. Only the last split tensor is cached.
    """
    specs = {spec.name: spec for spec in weight_specs(config)}
    parts = {
        name: (spec, rows)
        for spec in specs.values()
        for name, rows in parts_in_gguf(config, spec.name, spec.shape).items()
    }
    held: dict[str, np.ndarray] = {}

    def of_part(spec: WeightSpec) -> np.ndarray:
        if spec.name not in parts:
            own = shared_value(spec, specs, value)
            return value(specs[spec.name]).reshape(spec.shape) if own is None else own
        source, rows = parts[spec.name]
        if source.name not in held:
            held.clear()
            held[source.name] = value(source)
        return held[source.name].take(rows, rows_axis(source.name))

    return of_part


def name_map(gguf: Any, architecture: str, layers: int) -> Any:
    """Return the gguf package's map of tensor names, or our own table of an architecture that the package lacks.

    architecture: its name in GGUF files.
    """
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}.get(architecture)
    return ARCHITECTURES[architecture] if known is None else gguf.get_tensor_name_map(known, layers)


def tensor_name(names: Any, name: str) -> str:
    """Return GGUF's name of a tensor, or "" if it has none. names: from `name_map`."""
    if isinstance(names, dict):
        return gguf_name(name, names)
    name = name.replace(".dt_bias", ".dt_proj.bias")
    name = name.replace("score_correction_bias", "score_correction.bias").replace("gate.moe_statics", "moe_statics")
    name = name.replace("block_sparse_moe.router", "mlp.gate").replace("block_sparse_moe", "mlp")
    name = name.replace(".expert_bias", ".expert_bias.bias")
    name = name.replace("router.scale", "router.proj.scale").replace("mixer.experts.", "mlp.experts.")
    name = name.replace("router.per_expert_scale", "experts.down_proj.scale")
    found = next(filter(None, (names.get_name(own, (".weight", ".bias", ".scale")) for own in _forms(name))), "")
    if found and not found.endswith(_ENDINGS):  # weights of experts have no ending in our names
        found += ".weight"
    return found


def _forms(name: str) -> Iterator[str]:
    """Yield a tensor's name, and its names in early files of Nemotron-H, in GPT-NeoX and in Falcon."""
    yield name
    for prefix in ("backbone.", "gpt_neox."):
        yield name.replace("model.", prefix, 1)
    yield name.replace("model.layers.", "transformer.h.", 1).replace("model.", "transformer.", 1)


def tensor_names(config: ModelConfig) -> dict[str, str]:
    """Return GGUF's names by ours, for all tensors that have one.

    Ours are both the names of `gguf_specs` and of `weight_specs`. A weight that GGUF splits maps to its first part.
    """
    gguf = require_gguf("--format gguf", "model.gguf")
    names = name_map(gguf, config.gguf, config.num_hidden_layers)
    found = {spec.name: tensor_name(names, spec.name) for spec in gguf_specs(config)}
    for spec in weight_specs(config):
        first = next(iter(parts_in_gguf(config, spec.name, spec.shape)), stack_of(spec.name))
        found.setdefault(spec.name, found.get(first, ""))
    return {ours: theirs for ours, theirs in found.items() if theirs}


def write_experts(writer: Any, config: ModelConfig) -> None:
    """Write the keys of the experts, if the model has any."""
    if config.experts is None:
        return
    traits = config.gguf_traits
    writer.add_expert_count(config.experts.count)
    writer.add_expert_used_count(config.experts.chosen)
    if traits.states_expert_width:
        writer.add_expert_feed_forward_length(config.experts.width)
    if config.experts.shared_width:
        writer.add_expert_shared_feed_forward_length(config.experts.shared_width)
    if config.experts.latent_width:
        writer.add_moe_latent_size(config.experts.latent_width)
    write_llama4(writer, config)
    if config.experts.correction or config.latent is not None or traits.averages:
        listed = bool(config.mlp_layers)
        write_scored(writer, require_gguf("--format gguf", config.gguf), config.experts, listed, traits.averages)


def without_place(config: ModelConfig) -> Iterator[str]:
    """Yield the properties of the experts that llama.cpp does not support for this architecture."""
    traits = config.gguf_traits
    if config.experts is None:
        if traits.lists_mlps or traits.without_mlps:
            yield "no layer with experts"
        return
    if traits.averages:
        usual = 0.5 if config.experts.shared_width else 1.0
        if (config.experts.share_scale, config.experts.shared_scale) != (usual, usual):
            yield "experts and shared experts whose outputs are added"
    if traits.normalizes not in (None, config.experts.normalize):
        yield f"experts whose weights {'' if config.experts.normalize else 'do not '}add up to 1"
    if traits.equal_heads and config.num_key_value_heads != config.num_attention_heads:
        yield "fewer heads of keys than of queries"
    if traits.unscaled and (config.experts.share_scale != 1 or not config.experts.correction):
        yield "experts whose weights are scaled, or chosen without a bias"
    if config.mlp_layers or traits.chunked or traits.tensors_tell:  # files say which layers have experts
        pass
    elif config.experts.correction or config.latent is not None or traits.lists_mlps:
        yield from without_scored_place(config.experts)
    elif not all(config.experts.layers):
        yield "layers without experts"
    if config.experts.biased and not (config.qkv_bias and config.o_bias):
        yield "biases of experts and none of attention"
    swiglu = (config.experts.alpha, config.experts.limit)
    if swiglu != traits.swiglu:
        yield f"experts with swiglu_alpha {swiglu[0]:g} and swiglu_limit {swiglu[1]:g}"


def keys_of_experts(fields: GgufFields, count: int, layers: int, tensors: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Return the config.json keys of the experts. count: number of experts. layers: number of layers."""
    if not count:
        return {}
    prefix, traits = fields.architecture + ".", fields.traits
    if traits.expert_keys:
        found = EXPERT_KEYS[traits.expert_keys](fields, count, fields.needed(prefix + "expert_used_count", int))
        if traits.lists_mlps:
            del found["first_k_dense_replace"]
            routed = (f"model.layers.{i}.mlp.gate.weight" in tensors for i in range(layers))
            found["mlp_layer_types"] = ["sparse" if layer else "dense" for layer in routed]
        return found
    if traits.normalizes is None:
        raise fields.error(prefix + "expert_count", f"must be 0 for this architecture, got {count}")
    found = {**dict.fromkeys(traits.counts, count), "norm_topk_prob": traits.normalizes}
    found["num_experts_per_tok"] = fields.needed(prefix + "expert_used_count", int)
    widths = {"moe_intermediate_size": "expert_"}
    widths |= dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), "expert_shared_")
    named = {key: fields.get(f"{prefix}{kind}feed_forward_length", int) for key, kind in widths.items()}
    return found | {key: width for key, width in named.items() if width is not None}
