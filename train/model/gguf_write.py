"""Writing a whole model to a GGUF file: tensor by tensor, after the metadata.

The metadata comes from the base model's own GGUF file, or from its config.json and tokenizer.
Source: github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wgrad.device.errors import WgradError
from wgrad.device.formats.frozen_weight import gguf_formats
from wgrad.device.formats.gguf_quantize import quantize_rows
from wgrad.device.shown import as_text
from wgrad.train.files.gguf_files import gguf_parts, permute
from wgrad.train.files.gguf_metadata import read_metadata
from wgrad.train.files.gguf_names import ROPE_FACTORS, ROPE_LONG, ROPE_SHORT
from wgrad.train.files.imatrix_file import IMATRIX_FILE
from wgrad.train.model.gguf_activation import write_activation
from wgrad.train.model.gguf_adapter import heads_side_by_side
from wgrad.train.model.gguf_experts import by_parts, gguf_specs, tensor_names, write_experts
from wgrad.train.model.gguf_latent import LENGTHS, by_head, write_heads, write_latent
from wgrad.train.model.gguf_linear import to_gguf, write_linear
from wgrad.train.model.gguf_mamba import mlp_lengths
from wgrad.train.model.gguf_mix import MIXES
from wgrad.train.model.gguf_model import FILE, TYPES, GgufModel, gguf_package, log_multiplier
from wgrad.train.model.gguf_shared_keys import frequency_factors, write_shared
from wgrad.train.model.gguf_windows import write_windows
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_files import Progress
from wgrad.train.model.rope_scaling import RopeConfig, inverse_frequencies
from wgrad.train.model.weights import WeightSpec

_FILE_TYPES = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}
# Keys that are written anew. Tensor data begins at the gguf package's alignment.
_OWN = ("general.architecture", "general.file_type", "general.quantization_version", "general.alignment")

WriteTokenizer = Callable[[Any, Any, Path, int], None]  # GGUFWriter, gguf, folder, vocabulary


def save_gguf(
    path: Path,
    model: GgufModel,
    value: Callable[[WeightSpec], np.ndarray],
    write_tokenizer: WriteTokenizer,
    progress: Progress | None = None,
    over: Mapping[str, str | int] = {},
) -> None:
    """Write the file tensor by tensor, so that only one is in memory.

    Args:
        value: Returns a tensor in Hugging Face's layout, float32. It is called when the tensor is written.
        over: Metadata that replaces that of a GGUF base.

    Raises:
        WgradError: A value does not fit its type, or GGUF cannot hold the tokenizer.
    """
    gguf, config = gguf_package(), model.config
    names, specs, value = tensor_names(config), gguf_specs(config), by_parts(config, value)
    writer = gguf.GGUFWriter(path, config.gguf)
    _describe(writer, model, write_tokenizer, over)
    factors = _rope_factors(model)
    for name, of_pairs in factors.items():
        writer.add_tensor_info(name, of_pairs.shape, of_pairs.dtype, of_pairs.nbytes)
    for spec in specs:
        kind = gguf.GGMLQuantizationType[model.stored(spec)]
        writer.add_tensor_info(names[spec.name], spec.shape, np.dtype(np.float32), model.nbytes(spec), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for of_pairs in factors.values():
        writer.write_tensor_data(of_pairs)
    for done, spec in enumerate(specs):
        if progress:
            progress(done, len(specs))
        writer.write_tensor_data(_stored(spec, model, value(spec)))
    writer.close()


def _stored(spec: WeightSpec, model: GgufModel, value: np.ndarray) -> np.ndarray:
    """Convert a tensor to the file's values, order and storage type."""
    gguf, name = gguf_package(), model.stored(spec)
    value = value.astype(np.float32)
    if spec.offset:
        value = value + np.float32(spec.offset)
    value = by_head(model.config, spec.name, to_gguf(model.config, spec.name, value))
    if heads := heads_side_by_side(model.config, spec.name.rpartition(".")[0]):
        value = permute(value.reshape(len(value), -1), heads).reshape(value.shape)
    if value.ndim == 3:  # experts
        value = value.reshape(-1, value.shape[2])
    with np.errstate(over="ignore"):
        data = quantize_rows(gguf, value, name, model.importance(spec))
    kind = gguf_formats().get(name)
    parts = kind.from_gguf(data, (value.shape[0], value.shape[1])).finite_parts() if kind else iter([data])
    if name != "BF16" and not all(np.isfinite(part).all() for part in parts):
        raise WgradError(
            f"{FILE}: {spec.name} has values up to {float(np.abs(value).max()):.3g}, which {name} does not hold: use "
            f"--quantize {'q8_0' if name == 'F16' and model.kind not in MIXES else 'none'}"
        )
    return data


# ---- metadata --------------------------------------------------------------------------------------------------
def _describe(writer: Any, model: GgufModel, write_tokenizer: WriteTokenizer, over: Mapping[str, str | int]) -> None:
    gguf, name = gguf_package(), TYPES.get(model.kind, model.kind.upper())
    if model.base is not None:
        for entry in read_metadata(gguf_parts(model.base.path, "--model")[0], "--model"):
            if entry.key.endswith(".block_count"):  # multi-token prediction layers are not written
                writer.add_block_count(model.config.num_hidden_layers)
            elif not (entry.key in (*_OWN, *LENGTHS, *over) or entry.key.startswith("split.") or _is_extra(entry.key)):
                writer.add_key_value(entry.key, entry.value, entry.type, entry.sub_type)
        if model.config.gguf_traits.splits_kv_b:
            write_heads(writer, model.config)
        for key, value in over.items():
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    else:
        writer.add_name(as_text(model.files.folder.name))
        _write_shapes(writer, model.config)
        _write_rope(writer, gguf, model.config)
        write_activation(writer, model.config, model.files.read)
        write_tokenizer(writer, gguf, model.files.folder, model.config.vocab_size)
    if model.imatrix is not None:
        writer.add_string("quantize.imatrix.file", IMATRIX_FILE)
        writer.add_string("quantize.imatrix.dataset", as_text(model.imatrix.source))
        writer.add_uint32("quantize.imatrix.entries_count", len(model.imatrix.means))
        writer.add_uint32("quantize.imatrix.chunks_count", 1)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES.get(name, f"MOSTLY_{name}")])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _is_extra(key: str) -> bool:
    """Return whether a key belongs to multi-token prediction layers, which are not written."""
    return key.endswith(".nextn_predict_layers")


def _write_shapes(writer: Any, config: ModelConfig) -> None:
    traits = config.gguf_traits
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if traits.shares:
        writer.add_head_count(config.num_attention_heads)
        write_shared(writer, config)
    else:
        writer.add_feed_forward_length(mlp_lengths(config))
        write_heads(writer, config)
    (writer.add_layer_norm_eps if config.layer_norm else writer.add_layer_norm_rms_eps)(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    write_experts(writer, config)
    write_linear(writer, config)
    write_latent(writer, config)
    if config.score_softcap:
        writer.add_attn_logit_softcapping(config.score_softcap)
        writer.add_final_logit_softcapping(config.logit_softcap)
    if traits.scaled:
        writer.add_embedding_scale(config.embedding_scale)
        writer.add_attention_scale(config.score_scale or config.head_dim**-0.5)
        writer.add_residual_scale(config.residual_scale)
        writer.add_logit_scale(1 / config.logit_scale)
    if traits.states_logit_scale:
        writer.add_logit_scale(config.logit_scale)
    if config.clip_qkv:
        writer.add_clamp_kqv(config.clip_qkv)
    if not traits.shares:
        write_windows(writer, config)
    if traits.states_parallel:
        writer.add_parallel_residual(config.parallel)


def _write_rope(writer: Any, gguf: Any, config: ModelConfig) -> None:
    rope = config.rope
    if not config.any_attends:
        return
    writer.add_rope_dimension_count(rope.head_dim)
    writer.add_rope_freq_base(rope.theta)
    if rope.type in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[rope.type.upper()])
        writer.add_rope_scaling_factor(rope.factor)
    if rope.type in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope.original_max_position_embeddings)
    if rope.type == "longrope":
        writer.add_rope_scaling_attn_factors(rope.attention_factor)
    if rope.type == "yarn" and config.gguf_traits.states_yarn:
        writer.add_rope_scaling_yarn_beta_fast(rope.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(rope.beta_slow)
        writer.add_rope_scaling_yarn_log_mul(log_multiplier(rope))
        writer.add_attn_temperature_scale(config.query_growth)


def _rope_factors(model: GgufModel) -> dict[str, np.ndarray]:
    """Return the tensors of frequency divisors by name, float32 [rotated / 2]."""
    rope = model.config.rope
    if model.base is not None:
        given = {name: model.files.entries.get(name) for name in (ROPE_FACTORS, ROPE_LONG, ROPE_SHORT)}
        return {name: entry.finite_array().astype(np.float32) for name, entry in given.items() if entry is not None}
    if rope.type == "longrope":
        both = {ROPE_LONG: rope.long_factor, ROPE_SHORT: rope.short_factor}
        return {name: np.array(factors, np.float32) for name, factors in both.items()}
    if model.config.gguf_traits.proportional:
        return {ROPE_FACTORS: frequency_factors(rope)}
    if rope.type != "llama3":
        return {}
    return {ROPE_FACTORS: inverse_frequencies(RopeConfig(rope.head_dim, rope.theta)) / inverse_frequencies(rope)}
