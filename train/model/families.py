"""The model families, one entry each: what their config.json may hold, and in what they differ from a plain LLaMA.

Another family is a class of its keys, where it has keys of its own, and an entry in FAMILIES; what a family can have
is the fields of `ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from wgrad.train.model.config_file import (
    AtLeast0,
    ConfigFile,
    Count,
    Epsilon,
    Factor,
    Positions,
    Theta,
    Vocabulary,
    Width,
    check_causal,
    check_layers,
)


@dataclass(frozen=True)
class Family:
    """model_type: what stands for the architecture's name where a config.json has none. keys: what its config.json
    holds. variant: from those, the fields of `ModelConfig` that are not a plain LLaMA's. gguf: llama.cpp's name of the
    architecture, "" where it is not written into GGUF."""

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


class GemmaFile(ConfigFile, kw_only=True):
    """What Gemma 2 and 3 have alike."""

    hidden_size: Width = 2304
    intermediate_size: Width = 9216
    num_hidden_layers: Count = 26
    num_attention_heads: Count = 8
    num_key_value_heads: Count = 4
    head_dim: Width = 256
    hidden_act: Any = None  # not read: the next one is
    hidden_activation: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_pre_attn_scalar: Factor = 256
    sliding_window: Positions | None = 4096
    layer_types: list[str] | None = None
    final_logit_softcapping: Factor | None = None
    use_bidirectional_attention: bool | None = None

    def __post_init__(self) -> None:
        check_layers("layer_types", self.layer_types, self.num_hidden_layers)
        check_causal(self.use_bidirectional_attention)


class Gemma2File(GemmaFile, kw_only=True):
    vocab_size: Vocabulary = 256_000
    max_position_embeddings: Positions = 8192
    attn_logit_softcapping: Factor | None = 50.0
    final_logit_softcapping: Factor | None = 30.0


class Gemma3File(GemmaFile, kw_only=True):
    default_theta: ClassVar[float] = 1_000_000.0
    vocab_size: Vocabulary = 262_208
    max_position_embeddings: Positions = 131_072
    sliding_window_pattern: Count = 6
    rope_local_base_freq: Theta | None = None

    @property
    def local_theta(self) -> float:
        return self.rope_local_base_freq or 10_000.0


class GraniteFile(ConfigFile, kw_only=True):
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: Factor = 1.0
    attention_multiplier: Factor = 1.0
    residual_multiplier: Factor = 1.0
    logits_scaling: Factor = 1.0


class Olmo2File(ConfigFile, kw_only=True):
    vocab_size: Vocabulary = 50_304
    rms_norm_eps: Epsilon = 1e-5
    attention_bias: bool = False


class Olmo3File(Olmo2File, kw_only=True):
    default_theta: ClassVar[float] = 500_000.0
    sliding_window: Positions | None = 4096
    layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        check_layers("layer_types", self.layer_types, self.num_hidden_layers)

    @property
    def local_theta(self) -> float:
        return 500_000.0


class Phi3File(ConfigFile, kw_only=True):
    partial_rotary: ClassVar[bool] = True
    vocab_size: Vocabulary = 32_064
    hidden_size: Width = 3072
    intermediate_size: Width = 8192
    max_position_embeddings: Positions = 4096
    original_max_position_embeddings: Positions | None = 4096
    rms_norm_eps: Epsilon = 1e-5
    sliding_window: Positions | None = None

    def __post_init__(self) -> None:
        for rope in (self.rope_scaling, self.rope_parameters):
            if rope is not None and (rope.rope_type or rope.type) == "yarn":  # the first files say so of longrope
                rope.rope_type = "longrope"


class PhiFile(ConfigFile, kw_only=True):
    partial_rotary: ClassVar[bool] = True
    vocab_size: Vocabulary = 51_200
    hidden_size: Width = 2048
    intermediate_size: Width = 8192
    num_hidden_layers: Count = 24
    hidden_act: str = "gelu_new"
    rms_norm_eps: Any = None  # not read: the next one is
    layer_norm_eps: Epsilon = 1e-5
    partial_rotary_factor: AtLeast0 | None = 0.5
    qk_layernorm: bool = False

    def __post_init__(self) -> None:
        if self.qk_layernorm:
            raise ValueError("qk_layernorm must be false: LayerNorm of heads is not built here; got true")


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


def _one_full_of(keys: Any, pattern: int) -> tuple[int, ...]:
    """Windows where every `pattern`-th layer has none, unless `layer_types` names those."""
    layers = range(keys.num_hidden_layers)
    listed = keys.layer_types or ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in layers]
    return sliding(keys, (kind == "sliding_attention" for kind in listed))


def _gemma(keys: GemmaFile, pattern: int) -> dict[str, Any]:
    """What Gemma 2 (arXiv 2408.00118) and 3 (arXiv 2503.19786) share."""
    return {
        **_biases(keys),
        "hidden_act": keys.hidden_activation,
        "windows": _one_full_of(keys, pattern),
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
        "norm_offset": 1.0,
        "embedding_scale": keys.hidden_size**0.5,
        "score_scale": keys.query_pre_attn_scalar**-0.5,
        "logit_softcap": keys.final_logit_softcapping or 0.0,
    }


def _gemma2(keys: Gemma2File) -> dict[str, Any]:
    return {**_gemma(keys, 2), "score_softcap": keys.attn_logit_softcapping or 0.0}


def _gemma3(keys: Gemma3File) -> dict[str, Any]:
    return {**_gemma(keys, keys.sliding_window_pattern), "qk_norm": True}


def _granite(keys: GraniteFile) -> dict[str, Any]:
    """Granite 3 (arXiv 2408.13359): four factors."""
    return {
        **_biases(keys),
        "mlp_bias": keys.mlp_bias,
        "embedding_scale": keys.embedding_multiplier,
        "score_scale": keys.attention_multiplier,
        "residual_scale": keys.residual_multiplier,
        "logit_scale": 1 / keys.logits_scaling,
    }


def _olmo2(keys: Olmo2File) -> dict[str, Any]:
    """OLMo 2 (arXiv 2501.00656): norms of the outputs of attention and MLP, none before them."""
    return {
        **_biases(keys),
        "qk_norm": True,
        "qk_norm_whole": True,
        "attention_norm": "",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "",
        "mlp_out_norm": "post_feedforward_layernorm",
    }


def _phi3(keys: Phi3File) -> dict[str, Any]:
    """Phi-3 (arXiv 2404.14219) and Phi-4 (arXiv 2412.08905, 2503.01743)."""
    return {"fused": True, "windows": sliding(keys, [True] * keys.num_hidden_layers)}


def _layer_norm(keys: Any) -> dict[str, Any]:
    return {"layer_norm": True, "rms_norm_eps": keys.layer_norm_eps}


def _phi(keys: PhiFile) -> dict[str, Any]:
    """Phi-1, 1.5 (arXiv 2309.05463) and 2. Its own dropout (resid_pdrop) is left out: an adapter has one."""
    return {
        **_layer_norm(keys),
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "parallel": True,
        "gated": False,
        "mlp_norm": "input_layernorm",
        "final_norm": "model.final_layernorm",
        "o_proj": "self_attn.dense",
        "up_proj": "mlp.fc1",
        "down_proj": "mlp.fc2",
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
    "Gemma3ForCausalLM": Family("gemma3_text", Gemma3File, _gemma3, "gemma3"),
    "GraniteForCausalLM": Family("granite", GraniteFile, _granite, "granite"),
    "Olmo2ForCausalLM": Family("olmo2", Olmo2File, _olmo2, "olmo2"),
    "Olmo3ForCausalLM": Family(
        "olmo3", Olmo3File, lambda keys: {**_olmo2(keys), "windows": _one_full_of(keys, 4)}, "olmo2"
    ),
    "PhiForCausalLM": Family("phi", PhiFile, _phi, "phi2"),
    "Phi3ForCausalLM": Family("phi3", Phi3File, _phi3, "phi3"),
}
