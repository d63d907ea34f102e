"""Keys of config.json of the families with multi-head latent attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Protocol

from msgspec import Meta

from wgrad.train.model.config_file import (
    AtLeast0,
    ConfigFile,
    Count,
    Epsilon,
    Factor,
    Positions,
    RopeFile,
    Vocabulary,
    Width,
    check_mlp_layer_types,
)
from wgrad.train.model.expert_keys import ChosenCount
from wgrad.train.model.latent_attention import LatentAttention
from wgrad.train.model.near_llama_keys import check_growth, query_growth
from wgrad.train.model.scored_keys import ScoredFile, SharedCount
from wgrad.train.model.scored_variants import scored_experts
from wgrad.train.model.variants import llama

_Extra = Annotated[int, Meta(ge=0, le=64)]
_GROUPED = ("greedy", "group_limited_greedy")  # DeepSeek-V2 chooses among all experts, or within the best groups


class _LatentKeys(Protocol):
    """Keys common to these families."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_attention_heads(self) -> int: ...

    @property
    def num_key_value_heads(self) -> int | None: ...

    @property
    def attention_bias(self) -> bool: ...

    @property
    def q_lora_rank(self) -> int | None: ...

    @property
    def kv_lora_rank(self) -> int: ...

    @property
    def qk_nope_head_dim(self) -> int: ...

    @property
    def qk_rope_head_dim(self) -> int: ...

    @property
    def v_head_dim(self) -> int | None: ...


def _check(keys: _LatentKeys) -> None:
    """Raise ValueError if the sizes of heads are not supported."""
    heads = keys.num_attention_heads
    if keys.num_key_value_heads not in (None, heads):
        raise ValueError(
            f"num_key_value_heads must be num_attention_heads, {heads}, where keys come from a latent; got "
            f"{keys.num_key_value_heads}"
        )
    if keys.qk_nope_head_dim % 2 or keys.qk_rope_head_dim % 2:
        raise ValueError(
            f"qk_nope_head_dim and qk_rope_head_dim must be even; got {keys.qk_nope_head_dim} and "
            f"{keys.qk_rope_head_dim}"
        )
    width, value = keys.qk_nope_head_dim + keys.qk_rope_head_dim, _latent(keys).value
    if not 1 <= value <= width:
        raise ValueError(f"v_head_dim must be at most qk_nope_head_dim + qk_rope_head_dim, {width}; got {value}")


def _latent(keys: _LatentKeys) -> LatentAttention:
    return LatentAttention(
        query_rank=keys.q_lora_rank or 0,
        rank=keys.kv_lora_rank,
        plain=keys.qk_nope_head_dim,
        rotated=keys.qk_rope_head_dim,
        value=keys.v_head_dim or keys.hidden_size // keys.num_attention_heads,
        biased=keys.attention_bias,
    )


def _attention(keys: _LatentKeys, interleaved: bool) -> dict[str, Any]:
    """Return the fields of `ModelConfig` for attention."""
    return {"latent": _latent(keys), "o_bias": keys.attention_bias, "interleaved": interleaved}


class DeepseekV2File(ScoredFile, kw_only=True):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "scoring_func": (None, "softmax"),
        "moe_layer_freq": (None, 1),
    }
    usual_experts: ClassVar[int] = 64
    count_keys: ClassVar[tuple[str, ...]] = ("num_experts", "n_routed_experts")
    vocab_size: Vocabulary = 102_400
    attention_bias: bool = False
    mlp_bias: bool = False
    first_k_dense_replace: Annotated[int, Meta(ge=0)] = 0
    kv_lora_rank: Width = 512
    q_lora_rank: Width | None = 1536
    qk_nope_head_dim: Width = 128
    qk_rope_head_dim: Width = 64
    v_head_dim: Width = 128
    n_group: Count | None = None
    topk_group: Count | None = None
    topk_method: str | None = "greedy"
    n_shared_experts: SharedCount = 2
    norm_topk_prob: bool | None = False
    moe_intermediate_size: Width = 1407
    use_mla: bool | None = True
    mlp_layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        if self.topk_method not in _GROUPED:
            raise ValueError(f"topk_method must be {' or '.join(_GROUPED)}; got {self.topk_method!r}")
        if self.norm_topk_prob:
            raise ValueError(
                "norm_topk_prob must be false, as in DeepSeek's own models: transformers ignores true, and the code in "
                "a model's folder does not; got true"
            )
        if self.topk_method == _GROUPED[0]:
            self.n_group = self.topk_group = None
        super().__post_init__()
        check_mlp_layer_types(self.mlp_layer_types, self.num_hidden_layers)
        if self.use_mla is False:
            self.head_dim = None  # transformers takes hidden_size / num_attention_heads, whatever the file says
        else:
            _check(self)

    def sparse_layers(self) -> tuple[bool, ...]:
        """Return for each layer whether it has experts."""
        if self.mlp_layer_types is not None:
            return tuple(kind == "sparse" for kind in self.mlp_layer_types)
        return super().sparse_layers()

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of DeepSeek-V2 (arXiv 2405.04434), which chooses experts by plain softmax.

        Without use_mla, as in DeepSeek-OCR 2, attention is Llama's.
        """
        experts = scored_experts(self)
        if experts is not None:
            experts = replace(experts, sigmoid=False, correction="", groups_by_best=True)
        if self.use_mla is False:
            return {**llama(self), "experts": experts}
        return {**_attention(self, interleaved=True), "mlp_bias": self.mlp_bias, "experts": experts}


class DeepseekV3File(ScoredFile, kw_only=True):
    """Keys of DeepSeek-V3 and R1, Kimi K2 and Moonlight."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "scoring_func": (None, "sigmoid"),
        "topk_method": (None, "noaux_tc"),
        "moe_layer_freq": (None, 1),
    }
    usual_experts: ClassVar[int] = 256
    vocab_size: Vocabulary = 129_280
    hidden_size: Width = 7168
    intermediate_size: Width = 18_432
    num_hidden_layers: Count = 61
    num_attention_heads: Count = 128
    num_key_value_heads: Count | None = 128
    max_position_embeddings: Positions = 4096
    attention_bias: bool = False
    first_k_dense_replace: Annotated[int, Meta(ge=0)] | None = 3
    kv_lora_rank: Width = 512
    q_lora_rank: Width | None = 1536
    qk_nope_head_dim: Width = 128
    qk_rope_head_dim: Width = 64
    v_head_dim: Width | None = 128
    rope_interleave: bool | None = True
    n_group: Count | None = 8
    topk_group: Count | None = 4
    n_shared_experts: SharedCount = 1
    num_experts_per_tok: ChosenCount = 8
    routed_scaling_factor: AtLeast0 = 2.5
    moe_intermediate_size: Width = 2048
    num_mtp_layers: _Extra | None = None
    num_nextn_predict_layers: _Extra | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of DeepSeek-V3 (arXiv 2412.19437)."""
        extra = {} if self.num_mtp_layers is None else {"extra_layers": self.num_mtp_layers}
        return {**_attention(self, bool(self.rope_interleave)), "experts": scored_experts(self), **extra}


class Glm4MoeLiteFile(ScoredFile, kw_only=True):
    """Keys of GLM-4.7-Flash. head_dim replaces qk_rope_head_dim, as in transformers."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "scoring_func": (None, "sigmoid"),
        "topk_method": (None, "noaux_tc"),
        "first_k_dense_replace": (None, 1),  # not read by transformers
    }
    usual_experts: ClassVar[int] = 64
    vocab_size: Vocabulary = 154_880
    hidden_size: Width = 2048
    intermediate_size: Width = 10_240
    num_hidden_layers: Count = 47
    num_attention_heads: Count = 20
    num_key_value_heads: Count = 20
    max_position_embeddings: Positions = 202_752
    rms_norm_eps: Epsilon = 1e-5
    attention_bias: bool = False
    kv_lora_rank: Width = 512
    q_lora_rank: Width | None = 768
    qk_nope_head_dim: Width = 192
    qk_rope_head_dim: Width = 64
    v_head_dim: Width = 256
    rope_interleave: bool = True
    n_shared_experts: SharedCount = 1
    num_experts_per_tok: ChosenCount = 4
    n_group: Count = 1
    topk_group: Count = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: AtLeast0 = 1.8
    moe_intermediate_size: Width = 1536
    mlp_layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.qk_rope_head_dim = self.head_dim or self.qk_rope_head_dim
        _check(self)
        check_mlp_layer_types(self.mlp_layer_types, self.num_hidden_layers)

    def sparse_layers(self) -> tuple[bool, ...]:
        """Return for each layer whether it has experts: all but the first, if `mlp_layer_types` is missing."""
        if self.mlp_layer_types is None:
            return tuple(i > 0 for i in range(self.num_hidden_layers))
        return tuple(kind == "sparse" for kind in self.mlp_layer_types)

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of GLM-4.7-Flash, with DeepSeek-V3's attention and router."""
        return {**_attention(self, self.rope_interleave), "experts": scored_experts(self)}


class Mistral4File(ScoredFile, kw_only=True):
    """Keys of Mistral Small 4. partial_rotary_factor: states which part of a head qk_rope_head_dim is."""

    default_rope: ClassVar[RopeFile] = RopeFile(
        type="yarn",
        rope_theta=10_000.0,
        factor=128.0,
        original_max_position_embeddings=8192,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
        llama_4_scaling_beta=0.1,
    )
    usual_experts: ClassVar[int] = 128
    vocab_size: Vocabulary = 131_072
    intermediate_size: Width = 12_288
    num_hidden_layers: Count = 36
    num_key_value_heads: Count | None = 32
    max_position_embeddings: Positions = 1_048_576
    attention_bias: bool = False
    kv_lora_rank: Width = 256
    q_lora_rank: Width | None = 1024
    qk_nope_head_dim: Width = 64
    qk_rope_head_dim: Width = 64
    v_head_dim: Width | None = 128
    rope_interleave: bool | None = True
    n_shared_experts: SharedCount = 1
    num_experts_per_tok: ChosenCount = 4
    moe_intermediate_size: Width = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)
        check_growth(self)
        turned, width = self.qk_rope_head_dim, self.qk_nope_head_dim + self.qk_rope_head_dim
        if self.head_dim not in (None, width, turned):
            raise ValueError(f"head_dim must be qk_nope_head_dim + qk_rope_head_dim, {width}; got {self.head_dim}")
        for rope in filter(None, (self.rope_parameters, self.rope_scaling)):
            if rope.partial_rotary_factor not in (None, turned / width):
                raise ValueError(
                    "partial_rotary_factor of rope_parameters must be qk_rope_head_dim / (qk_nope_head_dim + "
                    f"qk_rope_head_dim), {turned / width:g}; got {rope.partial_rotary_factor:g}"
                )
            rope.partial_rotary_factor = None

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of Mistral Small 4.

        It has DeepSeek-V3's attention with queries that grow with the position, and experts that a softmax chooses.
        """
        experts, (growth, length) = scored_experts(self), query_growth(self)
        if experts is not None:
            experts = replace(experts, sigmoid=False, correction="", files="mistral4")
        attention = _attention(self, bool(self.rope_interleave))
        return {**attention, "query_growth": growth, "query_length": length, "experts": experts}


class MiniCpm3File(ConfigFile, kw_only=True):
    vocab_size: Vocabulary = 73_448
    hidden_size: Width = 2560
    intermediate_size: Width = 6400
    num_hidden_layers: Count = 62
    num_attention_heads: Count = 40
    num_key_value_heads: Count | None = 40
    max_position_embeddings: Positions = 32_768
    rms_norm_eps: Epsilon = 1e-5
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    kv_lora_rank: Width = 256
    q_lora_rank: Width | None = 768
    qk_nope_head_dim: Width = 64
    qk_rope_head_dim: Width = 32
    v_head_dim: Width | None = None
    scale_emb: Factor = 12
    scale_depth: Factor | None = 1.4
    dim_model_base: Width | None = 256

    def __post_init__(self) -> None:
        _check(self)

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of MiniCPM3 (arXiv 2404.06395).

        Embeddings, residuals and logits are scaled.
        """
        return {
            **_attention(self, interleaved=False),
            "mlp_bias": self.mlp_bias,
            "embedding_scale": self.scale_emb,
            "residual_scale": 1.0 if self.scale_depth is None else self.scale_depth / math.sqrt(self.num_hidden_layers),
            "logit_scale": (self.dim_model_base or self.hidden_size) / self.hidden_size,
        }


class YoutuFile(ConfigFile, kw_only=True):
    vocab_size: Vocabulary = 128_256
    hidden_size: Width = 2048
    intermediate_size: Width = 6144
    num_attention_heads: Count = 16
    num_key_value_heads: Count = 16
    max_position_embeddings: Positions = 131_072
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    kv_lora_rank: Width = 512
    q_lora_rank: Width | None = 1536
    qk_nope_head_dim: Width = 128
    qk_rope_head_dim: Width = 64
    v_head_dim: Width | None = 128
    rope_interleave: bool | None = True

    def __post_init__(self) -> None:
        _check(self)

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of Youtu-LLM (arXiv 2512.24618), a Llama with DeepSeek-V3's attention."""
        return _attention(self, bool(self.rope_interleave))
