"""What config.json of a LLaMA-type checkpoint says, in one frozen dataclass.

Accepts the files of transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters). Field names are Hugging Face's;
config_file.py has their types, ranges and defaults.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wgrad.device.errors import WgradError
from wgrad.train.files.decode import FETCH, convert, read_json, show
from wgrad.train.files.input_files import exists, one_line
from wgrad.train.model.config_file import (
    ConfigFile,
    LlamaFile,
    MistralFile,
    NameFile,
    QuantizationFile,
    Qwen2File,
    Qwen3File,
    SmolLM3File,
)
from wgrad.train.model.rope_scaling import RopeConfig, parse_rope

# Architecture -> model_type. SmolLM and SmolLM2 are LlamaForCausalLM; Qwen2.5 is Qwen2ForCausalLM.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
}
_FILES: dict[str, type[ConfigFile]] = {
    "LlamaForCausalLM": LlamaFile,
    "MistralForCausalLM": MistralFile,
    "Qwen2ForCausalLM": Qwen2File,
    "Qwen3ForCausalLM": Qwen3File,
    "SmolLM3ForCausalLM": SmolLM3File,
}
_GELU_TANH = ("gelu_pytorch_tanh", "gelu_new")


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and variants of a decoder. `windows[i]`: layer i's sliding window (0: none); `use_rope[i]`: it rotates."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    hidden_act: str  # "silu" or "gelu_tanh"
    windows: tuple[int, ...]
    use_rope: tuple[bool, ...]
    rope: RopeConfig
    quantization: QuantizationFile | None = None  # where bitsandbytes made the weights NF4

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim


def load_model_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """Read `folder`/config.json. WgradError: no such file, not JSON, a value out of range, an unsupported architecture
    or variant."""
    path = Path(folder) / "config.json"
    if not exists(path, "--model"):
        raise WgradError(
            f"--model: {folder} has no config.json: give the folder of a checkpoint in Hugging Face layout"
        )
    return parse_model_config(read_json(path, dict[str, Any], "--model"), f"--model: {path}")


def parse_model_config(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Mapping of config.json -> ModelConfig; `where` opens each error."""
    name = _architecture(convert(raw, NameFile, where), where)
    file = convert(raw, _FILES[name], where)
    hidden, heads, layers = file.hidden_size, file.num_attention_heads, file.num_hidden_layers
    head_dim = file.head_dim or hidden // heads
    kv_heads = file.num_key_value_heads or heads
    _check_heads(heads, kv_heads, head_dim, where)
    bias = getattr(file, "attention_bias", False)  # a field of those architectures that look at it
    rope_layers = _rope_layers(file)
    return ModelConfig(
        architecture=name,
        vocab_size=file.vocab_size,
        hidden_size=hidden,
        intermediate_size=file.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=file.rms_norm_eps,
        max_position_embeddings=file.max_position_embeddings,
        tie_word_embeddings=file.tie_word_embeddings,
        qkv_bias=bias or name == "Qwen2ForCausalLM",
        o_bias=bias,
        mlp_bias=getattr(file, "mlp_bias", False),
        qk_norm=isinstance(file, Qwen3File),
        hidden_act=_activation(file.hidden_act, where),
        windows=_windows(file, rope_layers),
        use_rope=rope_layers,
        rope=parse_rope(file, head_dim, 2_000_000.0 if isinstance(file, SmolLM3File) else 10_000.0, where),
        quantization=_quantization(file.quantization_config, where),
    )


def _architecture(file: NameFile, where: str) -> str:
    names = file.architectures or []
    for name in names:
        if name in ARCHITECTURES:
            return name
    if not names:
        for name, kind in ARCHITECTURES.items():
            if file.model_type == kind:
                return name
    found = one_line(", ".join(names) or f"model_type {file.model_type!r}")
    raise WgradError(f"{where}: architecture {found} is not supported: use a checkpoint of {', '.join(ARCHITECTURES)}")


def _check_heads(heads: int, kv_heads: int, head_dim: int, where: str) -> None:
    if heads % kv_heads:
        raise WgradError(
            f"{where}: num_attention_heads must be a multiple of num_key_value_heads; got {heads} and {kv_heads} (a "
            f"missing key has the architecture's default): {FETCH}"
        )
    if head_dim % 2 or not head_dim:
        raise WgradError(
            f"{where}: head_dim (hidden_size / num_attention_heads where it is not given) must be even, for rotary "
            f"embeddings, and at least 2; got {head_dim}: {FETCH}"
        )


def _activation(name: str, where: str) -> str:
    if name in ("silu", "swish"):
        return "silu"
    if name in _GELU_TANH:
        return "gelu_tanh"
    raise WgradError(f"{where}: hidden_act {show(name)} is not supported: silu and {', '.join(_GELU_TANH)} are")


def _rope_layers(file: ConfigFile) -> tuple[bool, ...]:
    """SmolLM3 leaves rotary embeddings out of every fourth layer; `no_rope_layers` holds 1 where a layer has them."""
    layers = file.num_hidden_layers
    if not isinstance(file, SmolLM3File):
        return (True,) * layers
    if file.no_rope_layers is not None:
        return tuple(bool(rotates) for rotates in file.no_rope_layers)
    return tuple((i + 1) % file.no_rope_layer_interval != 0 for i in range(layers))


def _windows(file: ConfigFile, rope_layers: tuple[bool, ...]) -> tuple[int, ...]:
    """Sliding window of each layer (0: none). A layer sees keys j with i - j < window, as in transformers."""
    layers = range(file.num_hidden_layers)
    if isinstance(file, MistralFile):
        return tuple(file.sliding_window or 0 for _ in layers)
    if not isinstance(file, (Qwen2File, SmolLM3File)) or not file.use_sliding_window:
        return (0,) * len(layers)
    if file.layer_types is not None:
        slides = [kind == "sliding_attention" for kind in file.layer_types]
    elif isinstance(file, Qwen2File):
        slides = [i >= file.max_window_layers for i in layers]
    else:
        slides = [not rotates for rotates in rope_layers]
    return tuple(file.sliding_window or 0 if slide else 0 for slide in slides)


def _quantization(file: QuantizationFile | None, where: str) -> QuantizationFile | None:
    if file is None:
        return None
    if file.quant_method != "bitsandbytes" or not file.load_in_4bit:
        raise WgradError(
            f"{where}: weights quantised by {show(file.quant_method)} (load_in_4bit: {show(file.load_in_4bit)}) cannot "
            "be read: use the unquantised checkpoint, or bitsandbytes NF4"
        )
    if file.bnb_4bit_quant_type != "nf4":
        raise WgradError(
            f"{where}: bnb_4bit_quant_type {show(file.bnb_4bit_quant_type)} is not supported: only nf4 is: use the "
            "unquantised checkpoint"
        )
    return file
