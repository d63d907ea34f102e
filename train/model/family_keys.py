"""Keys of config.json of model families that have their own keys or defaults.

The defaults are those of transformers' configuration classes. Values that are not supported here are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from wgrad.train.model.config_file import (
    AtLeast0,
    ConfigFile,
    Count,
    Epsilon,
    Factor,
    LayerTypesFile,
    Positions,
    Theta,
    Vocabulary,
    Width,
    check_causal,
    check_layer_types,
    check_layers,
    layer_windows,
)


class LlamaFile(ConfigFile, kw_only=True):
    attention_bias: bool = False
    mlp_bias: bool = False


class MistralFile(LayerTypesFile, kw_only=True):
    """Keys of Mistral, and of Ministral, which adds `layer_types`."""

    intermediate_size: Width = 14_336
    num_key_value_heads: Count = 8
    max_position_embeddings: Positions = 131_072


class Qwen2File(LayerTypesFile, kw_only=True):
    vocab_size: Vocabulary = 151_936
    intermediate_size: Width = 22_016
    num_key_value_heads: Count | None = 32
    max_position_embeddings: Positions = 32_768
    use_sliding_window: bool = False
    max_window_layers: Annotated[int, Meta(ge=0)] = 28

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None


class Qwen3File(Qwen2File, kw_only=True):
    head_dim: Width = 128
    attention_bias: bool = False


class SmolLM3File(LayerTypesFile, kw_only=True):
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
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Count = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers("no_rope_layers", self.no_rope_layers, self.num_hidden_layers)


class GemmaFile(ConfigFile, kw_only=True):
    vocab_size: Vocabulary = 256_000
    hidden_size: Width = 3072
    intermediate_size: Width = 24_576
    num_hidden_layers: Count = 28
    num_attention_heads: Count = 16
    num_key_value_heads: Count = 16
    head_dim: Width = 256
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: Positions = 8192
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    use_bidirectional_attention: bool | None = None

    def __post_init__(self) -> None:
        check_causal(self.use_bidirectional_attention)
        if self.hidden_act == "gelu":  # early files name gelu although the models use its tanh form
            self.hidden_act = "gelu_pytorch_tanh"


class SlidingGemmaFile(LayerTypesFile, kw_only=True):
    """Keys common to Gemma 2 and 3."""

    hidden_size: Width = 2304
    intermediate_size: Width = 9216
    num_hidden_layers: Count = 26
    num_attention_heads: Count = 8
    num_key_value_heads: Count = 4
    head_dim: Width = 256
    hidden_act: Any = None  # ignored: hidden_activation replaces it
    hidden_activation: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_pre_attn_scalar: Factor = 256
    final_logit_softcapping: Factor | None = None
    use_bidirectional_attention: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_causal(self.use_bidirectional_attention)


class Gemma2File(SlidingGemmaFile, kw_only=True):
    vocab_size: Vocabulary = 256_000
    max_position_embeddings: Positions = 8192
    attn_logit_softcapping: Factor | None = 50.0
    final_logit_softcapping: Factor | None = 30.0


class Gemma3File(SlidingGemmaFile, kw_only=True):
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


class GraniteWindows:
    """Sliding windows of Granite, and rotary embeddings that differ between layers."""

    __slots__ = ()
    num_hidden_layers: Count
    sliding_window: int | None
    layer_types: list[str] | None
    layer_rope_theta: list[float] | None

    def check_windows(self) -> None:
        """Raise ValueError if a list has another length than the layers, or layers of one kind differ in theta."""
        check_layer_types(self.layer_types, self.num_hidden_layers, self.sliding_window)
        check_layers("layer_rope_theta", self.layer_rope_theta, self.num_hidden_layers)
        for kind in (False, True):
            if len(self._thetas(kind)) > 1:
                raise ValueError("layer_rope_theta must be the same in all layers with a window, and in all without")

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """Window of each layer, 0 for none. Without layer_types the first of every four layers has none."""
        return layer_windows(self.layer_types, self.sliding_window, (i % 4 > 0 for i in range(self.num_hidden_layers)))

    def _thetas(self, slides: bool) -> list[float]:
        """Return the distinct thetas above 0 of layers with a window (slides), or of those without."""
        layers = zip(self.layer_rope_theta or (), self.layer_windows)
        return sorted({theta for theta, window in layers if theta and (window > 0) == slides})

    @property
    def layer_thetas(self) -> tuple[float | None, float | None]:
        """Theta of layers without a window, and of those with one; None if the file does not give it."""
        own, local = (self._thetas(slides) for slides in (False, True))
        return (own[0] if own else None), (local[0] if local else None)


class GraniteSwaFile(GraniteWindows, ConfigFile, kw_only=True):
    """Keys of Granite with sliding windows. layer_rope_theta: theta of each layer, 0 without rotary embeddings."""

    vocab_size: Vocabulary = 100_352
    hidden_size: Width = 2560
    intermediate_size: Width = 8192
    num_hidden_layers: Count = 24
    num_attention_heads: Count = 20
    num_key_value_heads: Count | None = 4
    max_position_embeddings: Positions = 8192
    rms_norm_eps: Epsilon = 1e-5
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: Factor = 1.0
    attention_multiplier: Factor = 1.0
    residual_multiplier: Factor = 1.0
    logits_scaling: Factor = 1.0
    sliding_window: Positions | None = 128
    layer_types: list[str] | None = None
    layer_rope_theta: list[AtLeast0] | None = None

    def __post_init__(self) -> None:
        self.check_windows()


class Olmo2File(ConfigFile, kw_only=True):
    vocab_size: Vocabulary = 50_304
    rms_norm_eps: Epsilon = 1e-5
    attention_bias: bool = False


class Olmo3File(LayerTypesFile, kw_only=True):
    default_theta: ClassVar[float] = 500_000.0
    vocab_size: Vocabulary = 50_304
    rms_norm_eps: Epsilon = 1e-5
    attention_bias: bool = False

    @property
    def local_theta(self) -> float:
        return 500_000.0


class Phi3File(ConfigFile, kw_only=True):
    partial_rotary: ClassVar[bool] = True
    dropouts: ClassVar[Mapping[str, float]] = {"attention_dropout": 0.0, "resid_pdrop": 0.0}
    vocab_size: Vocabulary = 32_064
    hidden_size: Width = 3072
    intermediate_size: Width = 8192
    max_position_embeddings: Positions = 4096
    original_max_position_embeddings: Positions | None = 4096
    rms_norm_eps: Epsilon = 1e-5
    sliding_window: Positions | None = None

    def __post_init__(self) -> None:
        for rope in (self.rope_scaling, self.rope_parameters):
            if rope is not None and (rope.rope_type or rope.type) == "yarn":  # early files use this name for longrope
                rope.rope_type = "longrope"


class Exaone4File(LayerTypesFile, kw_only=True):
    vocab_size: Vocabulary = 102_400
    intermediate_size: Width = 16_384
    num_key_value_heads: Count = 32
    rms_norm_eps: Epsilon = 1e-5
    sliding_window_pattern: Annotated[int, Meta(ge=0)] | str | None = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pattern(self.layer_types, self.sliding_window, self.sliding_window_pattern)


def check_pattern(listed: list[str] | None, window: int | None, given: int | str | None) -> None:
    """Raise ValueError if neither `layer_types` nor `sliding_window_pattern` tells which layers have a window."""
    if listed is None and window is not None and (not given or isinstance(given, str)):
        raise ValueError(f"sliding_window_pattern must be a number above 0 where layer_types is missing; got {given!r}")


class HyperClovaXFile(ConfigFile, kw_only=True):
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: Factor = 1.0
    attention_multiplier: Factor | None = None
    residual_multiplier: Factor = 1.0
    logits_scaling: Factor = 1.0
    use_post_norm: bool = True
