"""The model families, one entry each: what their config.json may hold, and in what they differ from a plain LLaMA.

Another family is a class of its keys, where it has keys of its own, and an entry in FAMILIES; what a family can have
is the fields of `ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from wgrad.train.model.config_file import ConfigFile, Count, Factor, Positions, Vocabulary, Width, check_layers


@dataclass(frozen=True)
class Family:
    """model_type: what stands for the architecture's name where a config.json has none. keys: what its config.json
    holds. variant: from those, the fields of `ModelConfig` that are not a plain LLaMA's. gguf: llama.cpp's name of the
    architecture."""

    model_type: str
    keys: type[ConfigFile]
    variant: Callable[[Any], dict[str, Any]]
    gguf: str


# ---- keys: the defaults are those of the configuration classes of transformers ---------------------
class LlamaFile(ConfigFile, kw_only=True):
    attention_bias: bool = False
    mlp_bias: bool = False


class MistralFile(ConfigFile, kw_only=True):
    intermediate_size: Width = 14_336
    num_key_value_heads: Count = 8
    max_position_embeddings: Positions = 131_072
    sliding_window: Positions | None = 4096


class Qwen2File(ConfigFile, kw_only=True):
    vocab_size: Vocabulary = 151_936
    intermediate_size: Width = 22_016
    num_key_value_heads: Count | None = 32
    max_position_embeddings: Positions = 32_768
    use_sliding_window: bool = False
    sliding_window: Positions | None = 4096
    max_window_layers: Annotated[int, Meta(ge=0)] = 28
    layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        check_layers("layer_types", self.layer_types, self.num_hidden_layers)


class Qwen3File(Qwen2File, kw_only=True):
    head_dim: Width = 128
    attention_bias: bool = False


class SmolLM3File(ConfigFile, kw_only=True):
    default_theta: ClassVar[float] = 2_000_000.0
    vocab_size: Vocabulary = 128_256
    hidden_size: Width = 2048
    num_hidden_layers: Count = 36
    num_attention_heads: Count = 16
    num_key_value_heads: Count | None = 4
    max_position_embeddings: Positions = 32_768
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: Positions | None = None
    layer_types: list[str] | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Count = 4

    def __post_init__(self) -> None:
        check_layers("layer_types", self.layer_types, self.num_hidden_layers)
        check_layers("no_rope_layers", self.no_rope_layers, self.num_hidden_layers)


class Gemma2File(ConfigFile, kw_only=True):
    vocab_size: Vocabulary = 256_000
    hidden_size: Width = 2304
    intermediate_size: Width = 9216
    num_hidden_layers: Count = 26
    num_attention_heads: Count = 8
    num_key_value_heads: Count = 4
    head_dim: Width = 256
    hidden_act: Any = None  # not read: the next one is
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: Positions = 8192
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_pre_attn_scalar: Factor = 256
    sliding_window: Positions | None = 4096
    layer_types: list[str] | None = None
    attn_logit_softcapping: Factor | None = 50.0
    final_logit_softcapping: Factor | None = 30.0
    use_bidirectional_attention: bool | None = None

    def __post_init__(self) -> None:
        check_layers("layer_types", self.layer_types, self.num_hidden_layers)
        if self.use_bidirectional_attention:
            raise ValueError("use_bidirectional_attention must be false: attention here is causal; got true")


# ---- variants --------------------------------------------------------------------------------------
def _biases(keys: Any) -> dict[str, Any]:
    return {"qkv_bias": keys.attention_bias, "o_bias": keys.attention_bias}


def sliding(keys: Any, layers: Iterable[bool]) -> tuple[int, ...]:
    """`sliding_window` in those of the layers that slide, 0 in the others (and everywhere where it is null)."""
    return tuple(keys.sliding_window or 0 if slides else 0 for slides in layers)


def _chosen_windows(keys: Any, unlisted: Iterable[bool]) -> tuple[int, ...]:
    """The layers that `layer_types` names, else `unlisted`; none without `use_sliding_window`."""
    if keys.layer_types is not None:
        unlisted = (kind == "sliding_attention" for kind in keys.layer_types)
    return sliding(keys, (keys.use_sliding_window and slides for slides in unlisted))


def _upper_windows(keys: Qwen2File) -> tuple[int, ...]:
    return _chosen_windows(keys, (i >= keys.max_window_layers for i in range(keys.num_hidden_layers)))


def _smollm3(keys: SmolLM3File) -> dict[str, Any]:
    """Every fourth layer has no rotary embeddings; `no_rope_layers` holds 1 where a layer has them."""
    if keys.no_rope_layers is not None:
        rotates = tuple(bool(layer) for layer in keys.no_rope_layers)
    else:
        rotates = tuple((i + 1) % keys.no_rope_layer_interval != 0 for i in range(keys.num_hidden_layers))
    windows = _chosen_windows(keys, (not layer for layer in rotates))
    return {**_biases(keys), "mlp_bias": keys.mlp_bias, "use_rope": rotates, "windows": windows}


def _gemma2(keys: Gemma2File) -> dict[str, Any]:
    """Gemma 2 (arXiv 2408.00118): every other layer slides, from the first on, unless `layer_types` names those."""
    listed = keys.layer_types or ["sliding_attention", "full_attention"] * keys.num_hidden_layers
    layers = listed[: keys.num_hidden_layers]
    return {
        **_biases(keys),
        "hidden_act": keys.hidden_activation,
        "windows": sliding(keys, (kind == "sliding_attention" for kind in layers)),
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
        "norm_offset": 1.0,
        "embedding_scale": keys.hidden_size**0.5,
        "score_scale": keys.query_pre_attn_scalar**-0.5,
        "score_softcap": keys.attn_logit_softcapping or 0.0,
        "logit_softcap": keys.final_logit_softcapping or 0.0,
    }


# SmolLM and SmolLM2 are LlamaForCausalLM; Qwen2.5 is Qwen2ForCausalLM.
FAMILIES = {
    "LlamaForCausalLM": Family("llama", LlamaFile, lambda keys: {**_biases(keys), "mlp_bias": keys.mlp_bias}, "llama"),
    "MistralForCausalLM": Family(
        "mistral", MistralFile, lambda keys: {"windows": sliding(keys, [True] * keys.num_hidden_layers)}, "llama"
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2", Qwen2File, lambda keys: {"qkv_bias": True, "windows": _upper_windows(keys)}, "qwen2"
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3", Qwen3File, lambda keys: {**_biases(keys), "qk_norm": True, "windows": _upper_windows(keys)}, "qwen3"
    ),
    "SmolLM3ForCausalLM": Family("smollm3", SmolLM3File, _smollm3, "smollm3"),
    "Gemma2ForCausalLM": Family("gemma2", Gemma2File, _gemma2, "gemma2"),
}
