"""Keys of config.json of families whose norms are LayerNorm or have no weights, or whose MLPs have no gate.

The defaults are those of transformers' configuration classes. Values that are not supported here are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from wgrad.train.model.config_file import (
    AtLeast0,
    ConfigFile,
    Count,
    Epsilon,
    Factor,
    LayerTypesFile,
    Positions,
    RopeFile,
    Vocabulary,
    Width,
)


class LayerNormFile(ConfigFile, kw_only=True):
    """Keys common to families whose norms are LayerNorm."""

    rms_norm_eps: Any = None  # ignored: layer_norm_eps replaces it
    layer_norm_eps: Epsilon = 1e-5


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
    layer_norm_eps: Any = None  # ignored: norm_eps replaces it
    norm_eps: Epsilon = 1e-5
    partial_rotary_factor: AtLeast0 | None = 0.5
    attention_bias: bool = False
    mlp_bias: bool = False


class CohereFile(ConfigFile, kw_only=True):
    """Keys of Command R and Aya. use_qk_norm: whether queries and keys are normed, as in Command R+."""

    default_theta: ClassVar[float] = 500_000.0
    vocab_size: Vocabulary = 256_000
    hidden_size: Width = 8192
    intermediate_size: Width = 22_528
    num_hidden_layers: Count = 40
    num_attention_heads: Count = 64
    max_position_embeddings: Positions = 8192
    rms_norm_eps: Any = None  # ignored: layer_norm_eps replaces it
    layer_norm_eps: Epsilon = 1e-5
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    logit_scale: Factor = 0.0625
    use_qk_norm: bool | None = False


class Cohere2File(LayerTypesFile, kw_only=True):
    vocab_size: Vocabulary = 256_000
    hidden_size: Width = 8192
    intermediate_size: Width = 22_528
    num_hidden_layers: Count = 40
    num_attention_heads: Count = 64
    max_position_embeddings: Positions = 8192
    rms_norm_eps: Any = None  # ignored: layer_norm_eps replaces it
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
    rms_norm_eps: Any = None  # ignored: it is the same in every model
    attention_bias: bool = False
    clip_qkv: Factor | None = None


class PhiFile(LayerNormFile, kw_only=True):
    partial_rotary: ClassVar[bool] = True
    dropouts: ClassVar[Mapping[str, float]] = {"attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    vocab_size: Vocabulary = 51_200
    hidden_size: Width = 2048
    intermediate_size: Width = 8192
    num_hidden_layers: Count = 24
    hidden_act: str = "gelu_new"
    partial_rotary_factor: AtLeast0 | None = 0.5
    qk_layernorm: bool = False


class StableLmFile(LayerNormFile, kw_only=True):
    partial_rotary: ClassVar[bool] = True
    dropouts: ClassVar[Mapping[str, float]] = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    vocab_size: Vocabulary = 50_304
    hidden_size: Width = 2560
    intermediate_size: Width = 6912
    num_key_value_heads: Count = 32
    max_position_embeddings: Positions = 4096
    partial_rotary_factor: AtLeast0 | None = 0.25
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False


class Starcoder2File(LayerNormFile, kw_only=True):
    dropouts: ClassVar[Mapping[str, float]] = {
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
    }
    vocab_size: Vocabulary = 49_152
    hidden_size: Width = 3072
    intermediate_size: Width = 12_288
    num_hidden_layers: Count = 30
    num_attention_heads: Count = 24
    num_key_value_heads: Count = 2
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: Positions = 4096
    tie_word_embeddings: bool = True
    layer_norm_eps: Any = None  # ignored: norm_epsilon replaces it
    norm_epsilon: Epsilon = 1e-5
    sliding_window: Positions | None = None
    use_bias: bool = True
