"""Writing a whole model to a GGUF file: `model.gguf` in a folder that wgrad and llama.cpp can read.

The file's metadata comes from the base model's own GGUF file, or from its config.json and tokenizer.
Source: github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from wgrad.device.errors import WgradError
from wgrad.device.formats.frozen_weight import gguf_formats
from wgrad.device.formats.gguf_quantize import quantize_rows
from wgrad.train.files.gguf_files import GgufEntry, gguf_parts, permute, require_gguf
from wgrad.train.files.gguf_metadata import read_metadata
from wgrad.train.files.imatrix_file import IMATRIX_FILE, Imatrix
from wgrad.train.model.gguf_activation import write_activation
from wgrad.train.model.gguf_adapter import heads_side_by_side
from wgrad.train.model.gguf_experts import (
    by_parts,
    gguf_specs,
    tensor_names,
    without_place,
    write_experts,
)
from wgrad.train.model.gguf_fixed import (
    ACTIVATIONS,
    EXAONE_32B,
    GGUF_LARGEST,
    GRANITE,
    LONGROPE,
    ONE_FULL_OF,
    ROTATE_IN_WINDOWS,
    UNBIASED,
    UNROUNDED,
)
from wgrad.train.model.gguf_latent import LENGTHS, SPLIT, by_head, without_latent_place, write_heads, write_latent
from wgrad.train.model.gguf_linear import to_gguf, without_linear_place, write_linear
from wgrad.train.model.gguf_mamba import UNROTATED, mlp_lengths
from wgrad.train.model.gguf_mix import MIXES, stored_type
from wgrad.train.model.gguf_shared_keys import (
    GEMMA_4,
    SHARING,
    frequency_factors,
    without_shared_place,
    write_shared,
)
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_files import ModelFiles, Progress
from wgrad.train.model.rope_scaling import RopeConfig, inverse_frequencies, yarn_factor
from wgrad.train.model.weights import WeightSpec, weight_specs

FILE = "model.gguf"
# Divisors of each pair's frequency: llama3's scaling, and longrope's beyond the original length and within it.
ROPE_FACTORS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_FILE_TYPES = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}
# Keys that are written anew. Tensor data begins at the gguf package's alignment.
_OWN = ("general.architecture", "general.file_type", "general.quantization_version", "general.alignment")

WriteTokenizer = Callable[[Any, Any, Path, int], None]  # GGUFWriter, gguf, folder, vocabulary


@dataclass(frozen=True)
class GgufModel:
    """A model to write to a GGUF file. kind: storage of matrices, a dtype or one of MIXES."""

    config: ModelConfig
    files: ModelFiles
    kind: str
    imatrix: Imatrix | None = None

    @cached_property
    def _names(self) -> dict[str, str]:
        return tensor_names(self.config)

    def stored(self, spec: WeightSpec) -> str:
        """Return GGUF's storage type of a tensor. Routers, norms and biases are stored in float32."""
        if len(spec.shape) == 1 or spec.kind in ("router", "norm", "bias"):
            return "F32"
        if self.kind not in MIXES:
            return _TYPES[self.kind]
        tied = "output.weight" not in self._names.values()
        important = self.imatrix is not None
        return stored_type(self.config, self.kind, self._names[spec.name], spec.shape[-1], tied, important)

    def importance(self, spec: WeightSpec) -> np.ndarray | None:
        """Return the cost of an error in each column of a matrix, or None if it is unknown."""
        if self.imatrix is None or len(spec.shape) != 2 or spec.kind not in ("embedding", "head", "projection"):
            return None
        return self.imatrix.of(self._names[spec.name], spec.shape[1])

    def nbytes(self, spec: WeightSpec) -> int:
        """Return the bytes of a tensor in the file."""
        block, size = _gguf().GGML_QUANT_SIZES[_gguf().GGMLQuantizationType[self.stored(spec)]]
        result: int = int(np.prod(spec.shape, dtype=np.int64)) // block * size
        return result

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(self.nbytes(spec) for spec in gguf_specs(self.config))

    def check(self, option: str = "--format gguf") -> None:
        """Raise WgradError if GGUF cannot hold a part of the model, or the gguf package is missing."""
        require_gguf(option, FILE if option == "--format gguf" else "its target")
        what = next(_without_place(self.config), "")
        if what and self.base is None:
            instead = "use --format safetensors and convert that with llama.cpp's convert_hf_to_gguf.py"
            raise WgradError(
                f"{option}: {self.files.folder} has {what}, which cannot be written into GGUF here: "
                f"{instead if option == '--format gguf' else 'leave the option out'}"
            )

    @property
    def base(self) -> GgufEntry | None:
        """A tensor of the base model's GGUF file, or None if the base is not GGUF."""
        return next((entry for entry in self.files.entries.values() if isinstance(entry, GgufEntry)), None)


def _without_place(config: ModelConfig) -> Iterator[str]:
    """Yield the properties of a model that a GGUF file cannot hold."""
    architecture, width = config.gguf, config.head_dim
    if not architecture:
        yield f"the architecture {config.architecture}"
        return
    names = tensor_names(config)
    yield from (f"a tensor {spec.name}" for spec in gguf_specs(config) if spec.name not in names)
    yield from without_place(config, architecture)
    yield from without_linear_place(config)
    if architecture in SHARING:
        yield from without_shared_place(config, architecture)
    yield from without_latent_place(config, architecture)
    every = _one_full_of(config)
    windows = _windows(config)
    window = max(windows)
    if architecture not in SHARING and windows != tuple(
        window if every and (i + 1) % every else 0 for i in range(config.num_hidden_layers)
    ):
        yield f"a sliding window of {window} tokens" + (f" in other layers than {architecture} has it" if every else "")
    if architecture == "afmoe" and not math.isclose(config.embedding_scale, config.hidden_size**0.5):
        yield "embeddings that are not scaled"
    if architecture == "command-r" and config.num_hidden_layers >= 64:
        yield "64 layers or more without norms of heads"
    if not _scales(config.rope, architecture):
        yield f"{config.rope.type} scaling"
    if architecture in GGUF_LARGEST:
        if config.num_hidden_layers == GGUF_LARGEST[architecture]:
            width = config.hidden_size // config.num_attention_heads
        if not math.isclose(config.score_scale, width**-0.5):
            yield f"scores scaled by {config.score_scale:g}"
    original = config.rope.original_max_position_embeddings if config.rope.type == "yarn" else 0
    if config.query_growth and config.query_length != original:
        yield f"queries that grow after {config.query_length} positions without yarn scaling from there"
    # These properties have no keys: llama.cpp fixes them by architecture.
    if config.hidden_act != ACTIVATIONS.get(architecture, "silu"):
        yield f"the activation {config.hidden_act}"
    if config.use_rope != _rotates(config, architecture):
        yield f"rotary embeddings in other layers than {architecture} has them"
    capped = config.logit_softcap > 0 if architecture in SHARING else architecture == "gemma2"
    if (config.score_softcap > 0, config.logit_softcap > 0) != (architecture == "gemma2", capped):
        yield f"soft caps where {architecture} has none, or none where it has them"
    unbiased = UNBIASED.get(architecture, ())
    yield from (
        f"a tensor {spec.name}"
        for spec in weight_specs(config)
        if spec.name.endswith(".bias") and any(part in spec.name for part in unbiased)
    )
    theta = config.rope.theta if architecture == "olmo2" else 10_000.0
    if architecture not in SHARING and config.local_rope and config.local_rope != RopeConfig(config.head_dim, theta):
        yield "rotary embeddings of its own in sliding layers"


def _rotates(config: ModelConfig, architecture: str) -> tuple[bool, ...]:
    """Return for each layer whether llama.cpp applies rotary embeddings."""
    if architecture in ROTATE_IN_WINDOWS and any(config.windows):
        return tuple(window > 0 for window in config.windows)
    if architecture in UNROTATED:
        return (False,) * config.num_hidden_layers
    return tuple(architecture != "smollm3" or bool((i + 1) % 4) for i in range(config.num_hidden_layers))


def _one_full_of(config: ModelConfig) -> int:
    """Return N if llama.cpp gives every N-th layer no window; 0 if it gives no layer a window."""
    architecture = config.gguf
    layers, every = EXAONE_32B
    if architecture == "exaone4":
        return every if config.num_hidden_layers == layers else 0
    return ONE_FULL_OF.get(architecture, 0)


def _log_multiplier(rope: RopeConfig) -> float | None:
    """Return llama.cpp's yarn_log_mul: 1.0 to cancel yarn's attention factor, 0.0 to keep it; None if neither fits."""
    if rope.attention_factor == 1.0:
        return 1.0
    return 0.0 if math.isclose(rope.attention_factor, yarn_factor(rope.factor), rel_tol=1e-6) else None


def _windows(config: ModelConfig) -> tuple[int, ...]:
    """Return each layer's window. Where no pattern is fixed, 0 replaces windows that no sequence exceeds."""
    if _one_full_of(config):
        return config.windows
    return tuple(window if window < config.max_position_embeddings else 0 for window in config.windows)


def _scales(rope: RopeConfig, architecture: str) -> bool:
    """Return whether a file can hold the scaling of positions; most architectures have only yarn's default factors."""
    if architecture in SHARING:
        return rope.type == "default" or (rope.type == "proportional" and architecture == GEMMA_4)
    if rope.type == "yarn" and architecture == "mistral3":
        return rope.truncate and _log_multiplier(rope) is not None
    if rope.type == "yarn" and architecture == SPLIT:
        return (rope.beta_fast, rope.beta_slow, rope.truncate) == (32.0, 1.0, True)
    if rope.type == "yarn":
        own = (rope.beta_fast, rope.beta_slow, rope.truncate) != (32.0, 1.0, architecture not in UNROUNDED)
        usual = math.isclose(rope.attention_factor, yarn_factor(rope.factor), rel_tol=1e-6)
        return architecture not in GGUF_LARGEST and usual and not own
    return rope.type in ("default", "linear", "llama3", *(["longrope"] if architecture in LONGROPE else []))


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
    gguf, config = _gguf(), model.config
    architecture = config.gguf
    names, specs, value = tensor_names(config), gguf_specs(config), by_parts(config, value)
    writer = gguf.GGUFWriter(path, architecture)
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


def _gguf() -> Any:
    return require_gguf("--format gguf", FILE)


def _stored(spec: WeightSpec, model: GgufModel, value: np.ndarray) -> np.ndarray:
    """Convert a tensor to the file's values, order and storage type."""
    gguf, name = _gguf(), model.stored(spec)
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
    gguf, name = _gguf(), _TYPES.get(model.kind, model.kind.upper())
    if model.base is not None:
        for entry in read_metadata(gguf_parts(model.base.path, "--model")[0], "--model"):
            if entry.key.endswith(".block_count"):  # multi-token prediction layers are not written
                writer.add_block_count(model.config.num_hidden_layers)
            elif not (entry.key in (*_OWN, *LENGTHS, *over) or entry.key.startswith("split.") or _is_extra(entry.key)):
                writer.add_key_value(entry.key, entry.value, entry.type, entry.sub_type)
        if model.config.gguf == SPLIT:
            write_heads(writer, model.config)
        for key, value in over.items():
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    else:
        writer.add_name(model.files.folder.name)
        _write_shapes(writer, model.config)
        _write_rope(writer, gguf, model.config)
        write_activation(writer, model.config, model.files.read)
        write_tokenizer(writer, gguf, model.files.folder, model.config.vocab_size)
    if model.imatrix is not None:
        writer.add_string("quantize.imatrix.file", IMATRIX_FILE)
        writer.add_string("quantize.imatrix.dataset", model.imatrix.source)
        writer.add_uint32("quantize.imatrix.entries_count", len(model.imatrix.means))
        writer.add_uint32("quantize.imatrix.chunks_count", 1)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES.get(name, f"MOSTLY_{name}")])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _is_extra(key: str) -> bool:
    """Return whether a key belongs to multi-token prediction layers, which are not written."""
    return key.endswith(".nextn_predict_layers")


def _write_shapes(writer: Any, config: ModelConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if config.gguf in SHARING:
        writer.add_head_count(config.num_attention_heads)
        write_shared(writer, config)
    else:
        writer.add_feed_forward_length(mlp_lengths(config))
        write_heads(writer, config)
    (writer.add_layer_norm_eps if config.layer_norm else writer.add_layer_norm_rms_eps)(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    write_experts(writer, config, config.gguf)
    write_linear(writer, config)
    write_latent(writer, config)
    if config.score_softcap:
        writer.add_attn_logit_softcapping(config.score_softcap)
        writer.add_final_logit_softcapping(config.logit_softcap)
    if config.gguf in GRANITE:
        writer.add_embedding_scale(config.embedding_scale)
        writer.add_attention_scale(config.score_scale or config.head_dim**-0.5)
        writer.add_residual_scale(config.residual_scale)
        writer.add_logit_scale(1 / config.logit_scale)
    windows, architecture = _windows(config), config.gguf
    if architecture in ("cohere2", "command-r"):
        writer.add_logit_scale(config.logit_scale)
    if config.clip_qkv:
        writer.add_clamp_kqv(config.clip_qkv)
    if architecture not in SHARING and (any(windows) or architecture == "phi3"):  # Phi-3 files state 0 for no window
        writer.add_sliding_window(max(windows))
    if architecture == "stablelm":
        writer.add_parallel_residual(config.parallel)
    if any(windows) and architecture == "olmo2":
        writer.add_sliding_window_pattern([window > 0 for window in windows])


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
    if rope.type == "yarn" and config.gguf == "mistral3":
        writer.add_rope_scaling_yarn_beta_fast(rope.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(rope.beta_slow)
        writer.add_rope_scaling_yarn_log_mul(_log_multiplier(rope))
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
    if model.config.gguf == GEMMA_4:
        return {ROPE_FACTORS: frequency_factors(rope)}
    if rope.type != "llama3":
        return {}
    return {ROPE_FACTORS: inverse_frequencies(RopeConfig(rope.head_dim, rope.theta)) / inverse_frequencies(rope)}
