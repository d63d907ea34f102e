"""Keys of each model family's config.json, where it has keys or defaults of its own.

The defaults are those of the configuration classes of transformers; a value that is not built here is refused.
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
    RopeFile,
    Theta,
    Vocabulary,
    Width,
    check_causal,
    check_layers,
)


class LlamaFile(ConfigFile, kw_only=True):
    attention_bias: bool = False
    mlp_bias: bool = False


class MistralFile(LayerTypesFile, kw_only=True):
    """transformers reads a file with `layer_types` as Ministral, which is a Mistral otherwise."""

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
        if self.hidden_act == "gelu":  # the first files say so, and mean the other
            self.hidden_act = "gelu_pytorch_tanh"


class SlidingGemmaFile(LayerTypesFile, kw_only=True):
    """Keys common to Gemma 2 and 3."""

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


class Ministral3File(ConfigFile, kw_only=True):
    default_rope: ClassVar[RopeFile] = RopeFile(
        type="yarn",
        rope_theta=1_000_000.0,
        factor=16.0,
        original_max_position_embeddings=16_384,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
        llama_4_scaling_beta=0.1,
    )
    vocab_size: Vocabulary = 131_072
    intermediate_size: Width = 14_336
    num_hidden_layers: Count = 34
    num_key_value_heads: Count = 8
    head_dim: Width = 128
    max_position_embeddings: Positions = 262_144
    rms_norm_eps: Epsilon = 1e-5
    sliding_window: Positions | None = None

    @property
    def growth(self) -> tuple[float, int]:
        """By what queries grow, and each time after how many positions."""
        rope = self.rope_scaling or self.rope_parameters or self.default_rope
        beta, length = rope.llama_4_scaling_beta or 0.0, rope.original_max_position_embeddings
        if beta and length is None:
            raise ValueError("llama_4_scaling_beta needs original_max_position_embeddings in rope_parameters; got none")
        if beta and (rope.rope_type or rope.type) in ("dynamic", "longrope", "su"):
            raise ValueError("llama_4_scaling_beta is supported with the rope_type default, linear, llama3 and yarn")
        return beta, length or 0


class CwmFile(LayerTypesFile, kw_only=True):
    default_theta: ClassVar[float] = 1_000_000.0
    default_rope: ClassVar[RopeFile] = RopeFile(
        rope_type="llama3",
        rope_theta=1_000_000.0,
        factor=16.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    vocab_size: Vocabulary = 128_256
    hidden_size: Width = 6144
    intermediate_size: Width = 21_504
    num_hidden_layers: Count = 64
    num_attention_heads: Count = 48
    num_key_value_heads: Count = 8
    head_dim: Width = 128
    max_position_embeddings: Positions = 131_072
    rms_norm_eps: Epsilon = 1e-5
    sliding_window: Positions = 8192
    mlp_bias: bool = False


class SeedOssFile(ConfigFile, kw_only=True):
    vocab_size: Vocabulary = 155_136
    intermediate_size: Width = 27_648
    num_hidden_layers: Count = 64
    num_attention_heads: Count = 80
    num_key_value_heads: Count | None = 8
    head_dim: Width | None = 128
    max_position_embeddings: Positions = 524_288
    attention_bias: bool = True
    attention_out_bias: bool = False
    mlp_bias: bool = False


class Exaone4File(LayerTypesFile, kw_only=True):
    vocab_size: Vocabulary = 102_400
    intermediate_size: Width = 16_384
    num_key_value_heads: Count = 32
    rms_norm_eps: Epsilon = 1e-5
    sliding_window_pattern: Annotated[int, Meta(ge=0)] | str | None = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.sliding_window_pattern
        if self.layer_types is None and self.sliding_window is not None and (not given or isinstance(given, str)):
            raise ValueError(
                f"sliding_window_pattern must be a number above 0 where layer_types is missing; got {given!r}"
            )


class HyperClovaXFile(ConfigFile, kw_only=True):
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: Factor = 1.0
    attention_multiplier: Factor | None = None
    residual_multiplier: Factor = 1.0
    logits_scaling: Factor = 1.0
    use_post_norm: bool = True


class Ernie45File(ConfigFile, kw_only=True):
    default_theta: ClassVar[float] = 500_000.0
    vocab_size: Vocabulary = 103_424
    hidden_size: Width = 1024
    intermediate_size: Width = 3072
    num_hidden_layers: Count = 18
    num_attention_heads: Count = 16
    num_key_value_heads: Count | None = 2
    head_dim: Width | None = 128
    max_position_embeddings: Positions = 131_072
    rms_norm_eps: Epsilon = 1e-5
    tie_word_embeddings: bool = True
    use_bias: bool | None = False


class HeliumFile(ConfigFile, kw_only=True):
    default_theta: ClassVar[float] = 100_000.0
    vocab_size: Vocabulary = 48_000
    hidden_size: Width = 2560
    intermediate_size: Width = 7040
    num_hidden_layers: Count = 24
    num_attention_heads: Count = 20
    num_key_value_heads: Count = 20
    head_dim: Width = 128
    max_position_embeddings: Positions = 4096
    rms_norm_eps: Epsilon = 1e-8
    attention_bias: bool = False
    mlp_bias: bool = False


class InternLm3File(ConfigFile, kw_only=True):
    """`qkv_bias` and `bias` are the original names of attention_bias and mlp_bias, which transformers wants equal."""

    vocab_size: Vocabulary = 128_512
    intermediate_size: Width = 10_240
    num_hidden_layers: Count = 48
    num_key_value_heads: Count | None = 2
    head_dim: Width | None = 128
    max_position_embeddings: Positions = 32_768
    rms_norm_eps: Epsilon = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    qkv_bias: bool | None = None
    bias: bool | None = None

    def __post_init__(self) -> None:
        self.attention_bias = self.attention_bias if self.qkv_bias is None else self.qkv_bias
        self.mlp_bias = self.mlp_bias if self.bias is None else self.bias
        if self.attention_bias != self.mlp_bias:
            both = f"{self.attention_bias} and {self.mlp_bias}"
            raise ValueError(f"attention_bias and mlp_bias (qkv_bias and bias) must be equal; got {both}")


class IQuestCoderFile(ConfigFile, kw_only=True):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"use_sliding_window": (None, False)}
    vocab_size: Vocabulary = 76_800
    hidden_size: Width = 5120
    intermediate_size: Width = 27_648
    num_hidden_layers: Count = 80
    num_attention_heads: Count = 40
    num_key_value_heads: Count | None = 8
    head_dim: Width | None = 128
    max_position_embeddings: Positions = 131_072
    rms_norm_eps: Epsilon = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False


class GraniteHybridFile(ConfigFile, kw_only=True):
    """Of GraniteMoeHybrid the models without experts and without Mamba layers."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"position_embedding_type": (None, "rope", "nope")}
    attention_bias: bool = False
    embedding_multiplier: Factor | None = 1.0
    attention_multiplier: Factor | None = 1.0
    residual_multiplier: Factor | None = 1.0
    logits_scaling: Factor | None = 1.0
    shared_intermediate_size: Width = 1024
    position_embedding_type: str | None = None
    num_local_experts: Annotated[int, Meta(ge=0)] | None = 8
    layer_types: list[str] | None = None
    layers_block_type: list[str] | None = None

    def __post_init__(self) -> None:
        if self.num_local_experts:
            raise ValueError(f"num_local_experts must be 0: experts are not built here; got {self.num_local_experts}")
        for key in ("layer_types", "layers_block_type"):
            check_layers(key, getattr(self, key), self.num_hidden_layers)
        kinds = self.layers_block_type or self.layer_types or ["mamba"]
        for kind in kinds:
            if kind not in ("attention", "full_attention"):
                raise ValueError(f"layer_types must be attention: other layers are not built here; got {kind!r}")


class HunYuanFile(ConfigFile, kw_only=True):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"use_qk_norm": (True,), "mlp_bias": (None, False)}
    vocab_size: Vocabulary = 290_943
    rms_norm_eps: Epsilon = 1e-5
    attention_bias: bool = False


class LayerNormFile(ConfigFile, kw_only=True):
    """Keys of families whose norms are LayerNorm."""

    rms_norm_eps: Any = None  # not read: the next one is
    layer_norm_eps: Epsilon = 1e-5
    qk_layernorm: bool = False

    def __post_init__(self) -> None:
        if self.qk_layernorm:
            raise ValueError("qk_layernorm must be false: LayerNorm of heads is not built here; got true")


class ArceeFile(ConfigFile, kw_only=True):
    hidden_size: Width = 2560
    intermediate_size: Width = 18_432
    hidden_act: str = "relu2"
    max_position_embeddings: Positions = 4096
    rms_norm_eps: Epsilon = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False


class Jais2File(LayerNormFile, kw_only=True):
    vocab_size: Vocabulary = 150_272
    hidden_size: Width = 3328
    intermediate_size: Width = 26_624
    num_attention_heads: Count = 26
    hidden_act: str = "relu2"
    max_position_embeddings: Positions = 8192
    attention_bias: bool = True
    mlp_bias: bool = True


class NemotronFile(LayerNormFile, kw_only=True):
    partial_rotary: ClassVar[bool] = True
    vocab_size: Vocabulary = 256_000
    hidden_size: Width = 6144
    intermediate_size: Width = 24_576
    num_attention_heads: Count = 48
    hidden_act: str = "relu2"
    max_position_embeddings: Positions = 4096
    layer_norm_eps: Any = None  # not read: the next one is
    norm_eps: Epsilon = 1e-5
    partial_rotary_factor: AtLeast0 | None = 0.5
    attention_bias: bool = False
    mlp_bias: bool = False


class GlmFile(ConfigFile, kw_only=True):
    partial_rotary: ClassVar[bool] = True
    vocab_size: Vocabulary = 151_552
    intermediate_size: Width = 13_696
    num_hidden_layers: Count = 40
    num_key_value_heads: Count | None = 2
    head_dim: Width | None = 128
    max_position_embeddings: Positions = 131_072
    rms_norm_eps: Epsilon = 1.5625e-07
    partial_rotary_factor: AtLeast0 | None = 0.5
    attention_bias: bool = True


class Glm4File(GlmFile, kw_only=True):
    num_key_value_heads: Count = 2
    head_dim: Width = 128


class Cohere2File(LayerTypesFile, kw_only=True):
    vocab_size: Vocabulary = 256_000
    hidden_size: Width = 8192
    intermediate_size: Width = 22_528
    num_hidden_layers: Count = 40
    num_attention_heads: Count = 64
    max_position_embeddings: Positions = 8192
    rms_norm_eps: Any = None  # not read: the next one is
    layer_norm_eps: Epsilon = 1e-5
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    logit_scale: Factor = 0.0625
    sliding_window_pattern: Count = 4


class ApertusFile(ConfigFile, kw_only=True):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "qk_norm": (True,), "post_norm": (None, False), "mlp_bias": (None, False),
    }  # fmt: skip
    default_theta: ClassVar[float] = 12_000_000.0
    default_rope: ClassVar[RopeFile] = RopeFile(
        rope_type="llama3",
        rope_theta=12_000_000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    vocab_size: Vocabulary = 131_072
    intermediate_size: Width = 14_336
    hidden_act: str = "xielu"
    max_position_embeddings: Positions = 65_536
    rms_norm_eps: Epsilon = 1e-5
    attention_bias: bool = False


class NanoChatFile(ConfigFile, kw_only=True):
    reversed_rope: ClassVar[bool] = True
    vocab_size: Vocabulary = 50_304
    hidden_size: Width = 768
    intermediate_size: Width = 8192
    num_hidden_layers: Count = 12
    num_attention_heads: Count = 6
    hidden_act: str = "relu2"
    final_logit_softcapping: Factor | None = 15.0
    attention_bias: bool = False


class OlmoFile(ConfigFile, kw_only=True):
    vocab_size: Vocabulary = 50_304
    rms_norm_eps: Any = None  # not read: it is the same in every model
    attention_bias: bool = False
    clip_qkv: Factor | None = None


class PhiFile(LayerNormFile, kw_only=True):
    partial_rotary: ClassVar[bool] = True
    vocab_size: Vocabulary = 51_200
    hidden_size: Width = 2048
    intermediate_size: Width = 8192
    num_hidden_layers: Count = 24
    hidden_act: str = "gelu_new"
    partial_rotary_factor: AtLeast0 | None = 0.5


class StableLmFile(LayerNormFile, kw_only=True):
    partial_rotary: ClassVar[bool] = True
    vocab_size: Vocabulary = 50_304
    hidden_size: Width = 2560
    intermediate_size: Width = 6912
    num_key_value_heads: Count = 32
    max_position_embeddings: Positions = 4096
    partial_rotary_factor: AtLeast0 | None = 0.25
    use_qkv_bias: bool = False
    use_parallel_residual: bool = False


class Starcoder2File(LayerNormFile, kw_only=True):
    vocab_size: Vocabulary = 49_152
    hidden_size: Width = 3072
    intermediate_size: Width = 12_288
    num_hidden_layers: Count = 30
    num_attention_heads: Count = 24
    num_key_value_heads: Count = 2
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: Positions = 4096
    tie_word_embeddings: bool = True
    layer_norm_eps: Any = None  # not read: the next one is
    norm_epsilon: Epsilon = 1e-5
    sliding_window: Positions | None = None
    use_bias: bool = True
