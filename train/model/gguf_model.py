"""A whole model as a GGUF file, `model.gguf` in a folder: how its tensors are stored, and what the format cannot hold.

Source: github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from wgrad.device.errors import WgradError
from wgrad.train.files.gguf_files import GgufEntry, require_gguf
from wgrad.train.files.gguf_traits import GgufTraits
from wgrad.train.files.imatrix_file import Imatrix
from wgrad.train.model.families import FAMILIES
from wgrad.train.model.gguf_experts import gguf_specs, tensor_names, without_place
from wgrad.train.model.gguf_latent import without_latent_place
from wgrad.train.model.gguf_linear import without_linear_place
from wgrad.train.model.gguf_llama4 import without_llama4_place
from wgrad.train.model.gguf_mix import MIXES, stored_type
from wgrad.train.model.gguf_shared_keys import without_shared_place
from wgrad.train.model.gguf_windows import without_window_place
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.model_files import ModelFiles
from wgrad.train.model.rope_scaling import RopeConfig, yarn_factor
from wgrad.train.model.weights import WeightSpec, weight_specs

FILE = "model.gguf"
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # by --dtype


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
            return TYPES[self.kind]
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
        block, size = gguf_package().GGML_QUANT_SIZES[gguf_package().GGMLQuantizationType[self.stored(spec)]]
        result: int = int(np.prod(spec.shape, dtype=np.int64)) // block * size
        return result

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(self.nbytes(spec) for spec in gguf_specs(self.config))

    def check(self, option: str = "--format gguf") -> None:
        """Raise WgradError if GGUF cannot hold a part of the model, or the gguf package is missing."""
        require_gguf(option, FILE if option == "--format gguf" else "its target")
        if found := otherwise_in_llama_cpp(self.config):
            raise WgradError(
                f"{option}: {self.files.folder} has {found[0]}, but llama.cpp {found[1]}: "
                f"{'use --format safetensors' if option == '--format gguf' else 'leave the option out'}"
            )
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


def otherwise_in_llama_cpp(config: ModelConfig) -> tuple[str, str] | None:
    """Return a property of a model, and what llama.cpp does instead; None if there is none."""
    if instead := FAMILIES[config.architecture].no_gguf:
        return f"the architecture {config.architecture}", instead
    if config.alibi:
        return "ALiBi", "rotates queries and keys instead"
    if config.score_scale_by_layer:
        return "scores divided by the number of their layer", "does not divide them"
    if config.clip_qkv and not any(key.key == "clip_qkv" for key in config.gguf_traits.keys):
        return f"queries, keys and values clipped to {config.clip_qkv:g}", "does not clip them"
    return None


def _without_place(config: ModelConfig) -> Iterator[str]:
    """Yield the properties of a model that a GGUF file cannot hold."""
    architecture, traits, width = config.gguf, config.gguf_traits, config.head_dim
    if not architecture:
        yield f"the architecture {config.architecture}"
        return
    names = tensor_names(config)
    yield from (f"a tensor {spec.name}" for spec in gguf_specs(config) if spec.name not in names)
    yield from without_place(config)
    yield from without_linear_place(config)
    if traits.shares:
        yield from without_shared_place(config)
    yield from without_latent_place(config)
    yield from without_llama4_place(config)
    yield from without_window_place(config)
    if config.heads and not traits.sized_layers:
        yield "layers that differ in their number of heads"
    if traits.untied and config.tie_word_embeddings:
        yield "one matrix for embedding and head"
    if traits.scaled_embeddings and not math.isclose(config.embedding_scale, config.hidden_size**0.5):
        yield "embeddings that are not scaled"
    if traits.normed_from is not None and config.qk_norm != (config.num_hidden_layers >= traits.normed_from):
        yield f"{'' if config.qk_norm else 'no '}norms of heads in {config.num_hidden_layers} layers"
    if not _scales(config.rope, traits):
        yield f"{config.rope.type} scaling"
    if traits.largest is not None:
        if config.num_hidden_layers == traits.largest:
            width = config.hidden_size // config.num_attention_heads
        if not math.isclose(config.score_scale, width**-0.5):
            yield f"scores scaled by {config.score_scale:g}"
    if traits.usual_width and config.hidden_size != config.num_attention_heads * config.head_dim:
        yield f"heads of {config.head_dim} elements instead of hidden_size / num_attention_heads"
    original = config.rope.original_max_position_embeddings if config.rope.type == "yarn" else 0
    if config.query_growth and config.query_length != original:
        yield f"queries that grow after {config.query_length} positions without yarn scaling from there"
    # These properties have no keys: llama.cpp fixes them by architecture.
    if _in_gguf(config.hidden_act) != _in_gguf(traits.activation):
        yield f"the activation {config.hidden_act}"
    if traits.biased and not config.qkv_bias:
        yield "attention without biases"
    if config.use_rope != _rotates(config, traits):
        yield f"rotary embeddings in other layers than {architecture} has them"
    capped = config.logit_softcap > 0 if traits.shares else traits.caps
    if (config.score_softcap > 0, config.logit_softcap > 0) != (traits.caps, capped):
        yield f"soft caps where {architecture} has none, or none where it has them"
    yield from (
        f"a tensor {spec.name}"
        for spec in weight_specs(config)
        if spec.name.endswith(".bias") and any(part in spec.name for part in traits.unbiased)
    )


def _in_gguf(activation: str) -> str:
    """Return llama.cpp's name of an activation: it computes the tanh form of GELU for both."""
    return "gelu" if activation == "gelu_tanh" else activation


def _rotates(config: ModelConfig, traits: GgufTraits) -> tuple[bool, ...]:
    """Return for each layer whether llama.cpp applies rotary embeddings."""
    if traits.lists_rotation:
        return config.use_rope
    if traits.rotates_in_mlps:
        routed = config.experts.layers if config.experts is not None else (False,) * config.num_hidden_layers
        return tuple(window > 0 or not layer for window, layer in zip(config.windows, routed))
    if traits.rotates_in_windows and any(config.windows):
        return tuple(window > 0 for window in config.windows)
    if traits.unrotated:
        return (False,) * config.num_hidden_layers
    every = traits.one_unrotated_of
    return tuple(not every or bool((i + 1) % every) for i in range(config.num_hidden_layers))


def log_multiplier(rope: RopeConfig) -> float | None:
    """Return llama.cpp's yarn_log_mul: 1.0 to cancel yarn's attention factor, 0.0 to keep it; None if neither fits."""
    if rope.attention_factor == 1.0:
        return 1.0
    return 0.0 if math.isclose(rope.attention_factor, yarn_factor(rope.factor), rel_tol=1e-6) else None


def _scales(rope: RopeConfig, traits: GgufTraits) -> bool:
    """Return whether a file can hold the scaling of positions; most architectures have only yarn's default factors."""
    if traits.shares:
        return rope.type == "default" or (rope.type == "proportional" and traits.proportional)
    if rope.type == "yarn" and traits.states_yarn:
        return rope.truncate and log_multiplier(rope) is not None
    if rope.type == "yarn" and traits.splits_kv_b:
        return (rope.beta_fast, rope.beta_slow, rope.truncate) == (32.0, 1.0, True)
    if rope.type == "yarn":
        own = (rope.beta_fast, rope.beta_slow, rope.truncate) != (32.0, 1.0, not traits.unrounded_yarn)
        usual = math.isclose(rope.attention_factor, yarn_factor(rope.factor), rel_tol=1e-6)
        return traits.largest is None and usual and not own
    places = {"longrope": traits.longrope, "llama3": traits.factors}
    return rope.type in ("default", "linear") or places.get(rope.type, False)


def gguf_package() -> Any:
    """Return the `gguf` package. Raises WgradError if it is not installed."""
    return require_gguf("--format gguf", FILE)
