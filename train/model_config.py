"""What config.json of a LLaMA-type checkpoint says, in one frozen dataclass.

Accepts the files of transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters). Field names are Hugging Face's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wgrad.autograd.errors import WgradError
from wgrad.train.rope_scaling import RopeConfig, parse_rope

# Architecture -> model_type. SmolLM and SmolLM2 are LlamaForCausalLM; Qwen2.5 is Qwen2ForCausalLM.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
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
    quantization: Mapping[str, Any] | None = None  # quantization_config of config.json, where the weights are NF4

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim


class _Reader:
    """config.json with errors that name the key."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise WgradError(f"{self.where}: {key} must be a whole number of at least 1; got {self.raw.get(key)!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        return default if value is None else bool(value)


def load_model_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """Read `folder`/config.json. WgradError: no such file, not JSON, an unsupported architecture or variant."""
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WgradError(
            f"--model: {folder} has no config.json: give the folder of a checkpoint in Hugging Face layout"
        ) from None
    except (OSError, ValueError) as error:
        raise WgradError(f"--model: cannot read {path}: {error}: fetch the file again") from error
    if not isinstance(raw, dict):
        raise WgradError(f"--model: {path}: expected a JSON object, got a {type(raw).__name__}: fetch the file again")
    return parse_model_config(raw, f"--model: {path}")


def parse_model_config(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Mapping of config.json -> ModelConfig; `where` opens each error."""
    name = _architecture(raw, where)
    kind = ARCHITECTURES[name]
    read = _Reader(raw, where)
    hidden, heads, layers = (read.integer(k) for k in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    head_dim = read.integer("head_dim", 128 if kind == "qwen3" else hidden // heads)
    kv_heads = read.integer("num_key_value_heads", heads)
    _check_heads(heads, kv_heads, head_dim, where)
    bias = kind in ("llama", "qwen3", "smollm3") and read.flag("attention_bias", False)
    positions = read.integer("max_position_embeddings", 2048)
    rope_layers = _rope_layers(raw, kind, layers)
    return ModelConfig(
        architecture=name,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=positions,
        tie_word_embeddings=read.flag("tie_word_embeddings", kind == "smollm3"),
        qkv_bias=bias or kind == "qwen2",
        o_bias=bias,
        mlp_bias=kind in ("llama", "smollm3") and read.flag("mlp_bias", False),
        qk_norm=kind == "qwen3",
        hidden_act=_activation(raw, where),
        windows=_windows(raw, kind, layers, rope_layers, where),
        use_rope=rope_layers,
        rope=parse_rope(raw, head_dim, positions, 2_000_000.0 if kind == "smollm3" else 10_000.0, where),
        quantization=_quantization(raw, where),
    )


def _architecture(raw: Mapping[str, Any], where: str) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return name
    if not names:
        for name, kind in ARCHITECTURES.items():
            if raw.get("model_type") == kind:
                return name
    found = ", ".join(map(str, names)) or f"model_type {raw.get('model_type')!r}"
    raise WgradError(f"{where}: architecture {found} is not supported: use a checkpoint of {', '.join(ARCHITECTURES)}")


def _check_heads(heads: int, kv_heads: int, head_dim: int, where: str) -> None:
    if heads % kv_heads:
        raise WgradError(
            f"{where}: num_attention_heads must be a multiple of num_key_value_heads; got {heads} and {kv_heads}"
        )
    if head_dim % 2:
        raise WgradError(f"{where}: head_dim must be even, for rotary embeddings; got {head_dim}")


def _activation(raw: Mapping[str, Any], where: str) -> str:
    name = raw.get("hidden_act", "silu")
    if name in ("silu", "swish"):
        return "silu"
    if name in _GELU_TANH:
        return "gelu_tanh"
    raise WgradError(f"{where}: hidden_act {name!r} is not supported: silu and {', '.join(_GELU_TANH)} are")


def _rope_layers(raw: Mapping[str, Any], kind: str, layers: int) -> tuple[bool, ...]:
    """SmolLM3 leaves rotary embeddings out of every fourth layer; `no_rope_layers` holds 1 where a layer has them."""
    if kind != "smollm3":
        return (True,) * layers
    interval = raw.get("no_rope_layer_interval") or 4
    listed = raw.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(layers)]
    return tuple(bool(v) for v in listed[:layers])


def _windows(
    raw: Mapping[str, Any], kind: str, layers: int, rope_layers: tuple[bool, ...], where: str
) -> tuple[int, ...]:
    """Sliding window of each layer (0: none). A layer sees keys j with i - j < window, as in transformers."""
    window = raw.get("sliding_window")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 0):
        raise WgradError(f"{where}: sliding_window must be a whole number or null; got {window!r}")
    if kind == "mistral":
        window = 4096 if "sliding_window" not in raw else window
        return (window or 0,) * layers
    if kind == "llama" or not window or not raw.get("use_sliding_window", False):
        return (0,) * layers
    types = raw.get("layer_types")
    if types is None:
        first = raw.get("max_window_layers", 28)
        slides = [not r for r in rope_layers] if kind == "smollm3" else [i >= first for i in range(layers)]
    else:
        slides = [t == "sliding_attention" for t in types]
    if len(slides) < layers:
        raise WgradError(f"{where}: layer_types must name each of the {layers} layers; got {len(slides)}")
    return tuple(window if s else 0 for s in slides[:layers])


def _quantization(raw: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
    value = raw.get("quantization_config")
    if value is None:
        return None
    if not isinstance(value, Mapping) or value.get("quant_method") != "bitsandbytes" or not value.get("load_in_4bit"):
        method = value.get("quant_method") if isinstance(value, Mapping) else value
        raise WgradError(
            f"{where}: weights quantised by {method!r} cannot be read: use the unquantised one, or bitsandbytes NF4"
        )
    if value.get("bnb_4bit_quant_type") != "nf4":
        raise WgradError(
            f"{where}: bnb_4bit_quant_type {value.get('bnb_4bit_quant_type')!r} is not supported: only nf4 is"
        )
    return dict(value)
