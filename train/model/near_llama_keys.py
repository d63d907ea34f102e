"""Keys of config.json of families that are close to Llama.

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
    LayerTypesFile,
    Positions,
    RopeFile,
    Vocabulary,
    Width,
)


def query_growth(keys: ConfigFile) -> tuple[float, int]:
    """Return `query_growth` and `query_length` of `ModelConfig`.

    As in transformers, types with scaling use the length that is outside of rope_parameters, if there is one.
    """
    rope = _rope(keys)
    length = rope.original_max_position_embeddings
    if (rope.rope_type or rope.type) in ("yarn", "llama3"):
        length = keys.original_max_position_embeddings or length or keys.max_position_embeddings
    return rope.llama_4_scaling_beta or 0.0, length or 0


def check_growth(keys: ConfigFile) -> None:
    """Raise ValueError if queries cannot grow as the keys ask."""
    rope, (beta, length) = _rope(keys), query_growth(keys)
    if beta and not length:
        raise ValueError("llama_4_scaling_beta needs original_max_position_embeddings in rope_parameters; got none")
    if beta and (rope.rope_type or rope.type) in ("dynamic", "longrope", "su"):
        raise ValueError("llama_4_scaling_beta is supported with the rope_type default, linear, llama3 and yarn")


def _rope(keys: ConfigFile) -> RopeFile:
    return keys.rope_scaling or keys.rope_parameters or keys.default_rope


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

    def __post_init__(self) -> None:
        check_growth(self)


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
    dropouts: ClassVar[Mapping[str, float]] = {"attention_dropout": 0.1, "residual_dropout": 0.1}
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
    """Keys of InternLM3. qkv_bias and bias are original names of attention_bias and mlp_bias, which must be equal."""

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


class HunYuanFile(ConfigFile, kw_only=True):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"use_qk_norm": (True,), "mlp_bias": (None, False)}
    vocab_size: Vocabulary = 290_943
    rms_norm_eps: Epsilon = 1e-5
    attention_bias: bool = False


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
