"""Whole models in GGUF, written with the gguf package: what llama.cpp loads and our code is compared with."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests.families.table import FAMILY_ROWS
from tests.train.conftest import VOCAB
from tests.train.gguf_writer import permuted
from wgrad.train.model.gguf_activation import write_activation
from wgrad.train.model.gguf_experts import name_map, parts_in_gguf, rows_axis, tensor_name, write_experts
from wgrad.train.model.gguf_linear import gguf_shape, to_gguf, write_key_heads, write_linear
from wgrad.train.model.gguf_mamba import mlp_lengths
from wgrad.train.model.gguf_shared_keys import frequency_factors, shared_specs, shared_value, write_shared
from wgrad.train.model.gguf_windows import write_windows
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.weights import weight_specs

LAYERS = 6  # most of a model


def write_base(path: Path, config: ModelConfig, weights: dict[str, np.ndarray]) -> None:
    """Write a whole model in float32, with a vocabulary in which token n is written <n>."""
    writer = gguf.GGUFWriter(path, config.gguf)
    _write_sizes(writer, config)
    _write_vocabulary(writer)
    write_experts(writer, config)
    write_linear(writer, config)
    write_activation(writer, config, lambda spec: weights[spec.name])
    _write_limits(writer, config)
    FAMILY_ROWS[config.architecture].gguf_keys(writer, config)
    _write_tensors(writer, config, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_sizes(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.positions if config.position_table else 64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(list(config.heads) or config.num_attention_heads)
    if config.gguf_traits.shares:
        write_shared(writer, config)
    else:
        writer.add_feed_forward_length(mlp_lengths(config))
        write_key_heads(writer, config)
        for add in (writer.add_key_length, writer.add_value_length):
            add(config.head_dim)
    writer.add_rope_dimension_count(config.rope.head_dim)
    (writer.add_layer_norm_eps if config.layer_norm else writer.add_layer_norm_rms_eps)(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)


def _write_vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"<{i}>" for i in range(VOCAB)])
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


def _write_limits(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    if config.score_softcap:
        writer.add_attn_logit_softcapping(config.score_softcap)
        writer.add_final_logit_softcapping(config.logit_softcap)
    if not config.gguf_traits.shares:
        write_windows(writer, config)
    if config.clip_qkv:
        writer.add_clamp_kqv(config.clip_qkv)


def _write_tensors(writer: gguf.GGUFWriter, config: ModelConfig, weights: dict[str, np.ndarray]) -> None:
    heads = [name for name in weights if ".norms." in name]  # in files of transformers a norm for each head
    whole = {
        f"{norm}.weight": np.stack([weights[name] for name in heads if name.startswith(f"{norm}.")])
        for norm in dict.fromkeys(name.partition(".norms.")[0] for name in heads)
    }
    weights = {name: value for name, value in weights.items() if name not in heads} | whole
    names = name_map(gguf, config.gguf, LAYERS)
    specs = {spec.name: spec for spec in weight_specs(config)}
    others = shared_specs(config, list(specs.values())) if config.gguf_traits.shares else []
    in_file = {spec.name: shared_value(spec, specs, lambda spec: weights[spec.name]) for spec in others}
    for name, value in in_file.items():
        if value is not None:
            writer.add_tensor(tensor_name(names, name), value)
    if config.rope.type == "proportional":
        writer.add_tensor("rope_freqs.weight", frequency_factors(config.rope))
    for name, value in weights.items():
        if ".act_fn." in name or (in_file and in_file.get(name, 0) is not None):
            continue
        value = to_gguf(config, name, _in_order(config, name, value))
        parts = {name: value.reshape(gguf_shape(config, name, value.shape))}
        if of_it := parts_in_gguf(config, name, value.shape):
            parts = {part: value.take(rows, rows_axis(name)) for part, rows in of_it.items()}
        for part, of_part in parts.items():
            writer.add_tensor(tensor_name(names, part), np.ascontiguousarray(of_part))


def _in_order(config: ModelConfig, name: str, value: np.ndarray) -> np.ndarray:
    """Return a weight with the rows, the axes and the offset that a file has."""
    row = FAMILY_ROWS[config.architecture]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if value.ndim == 2 and part in heads and not config.interleaved and row.paired:
        return permuted(value, heads[part])
    if "norm" in part and name.endswith(".weight") and "linear_attn" not in name:
        return value + np.float32(config.norm_offset)
    turned = row.turned == value.ndim and any(part in name for part in (".layers.", ".h."))
    return value.swapaxes(-1, -2) if turned else value
