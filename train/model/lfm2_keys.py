"""LFM2, dense and with experts: the keys of their config.json, and their differences from Llama."""

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
    Positions,
    Vocabulary,
    Width,
    check_layers,
)
from wgrad.train.model.expert_keys import ChosenCount, ExpertCount, ExpertsFile
from wgrad.train.model.experts import Experts
from wgrad.train.model.linear_attention import GatedConvolution


class Lfm2File(ConfigFile, kw_only=True):
    """Keys of dense LFM2.

    full_attn_idxs: indices of the layers with attention, if layer_types is missing. block_ff_dim and tie_embedding are
    older names of intermediate_size and tie_word_embeddings. The block_ keys derive the MLP's width from
    intermediate_size.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"conv_bias": (None, False)}
    default_theta: ClassVar[float] = 1_000_000.0
    vocab_size: Vocabulary = 65_536
    hidden_size: Width = 2560
    intermediate_size: Width = 12_288
    num_key_value_heads: Count = 8
    max_position_embeddings: Positions = 128_000
    hidden_act: Any = None  # ignored: it is the same in every model
    rms_norm_eps: Any = None  # ignored: norm_eps replaces it
    norm_eps: Epsilon = 1e-5
    tie_word_embeddings: bool = True
    tie_embedding: bool | None = None
    conv_L_cache: Annotated[int, Meta(ge=1, le=8)] = 3
    block_ff_dim: Width | None = None
    block_multiple_of: Width = 256
    block_ffn_dim_multiplier: Factor | None = 1.0
    block_auto_adjust_ff_dim: bool = True
    full_attn_idxs: list[int] | None = None
    layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        _check_kinds(self.layer_types, self.num_hidden_layers)
        if self.tie_embedding is not None:
            self.tie_word_embeddings = self.tie_embedding

    @property
    def conv_layers(self) -> tuple[bool, ...]:
        """Return for each layer whether it has the convolution."""
        if self.layer_types is not None:
            return tuple(kind == "conv" for kind in self.layer_types)
        attention = range(self.num_hidden_layers) if self.full_attn_idxs is None else self.full_attn_idxs
        return tuple(i not in attention for i in range(self.num_hidden_layers))

    @property
    def mlp_width(self) -> int:
        """Width of the MLP, after the block_ keys."""
        width = self.block_ff_dim or self.intermediate_size
        if not self.block_auto_adjust_ff_dim:
            return width
        width = int(2 * width / 3)
        if self.block_ffn_dim_multiplier is None:
            return width
        width, multiple = int(self.block_ffn_dim_multiplier * width), self.block_multiple_of
        return multiple * -(-width // multiple)

    def variant(self) -> dict[str, Any]:
        return {**_variant(self, self.conv_layers), "intermediate_size": self.mlp_width}


class Lfm2MoeFile(ExpertsFile, kw_only=True):
    """Keys of LFM2 with experts. tie_embedding is an older name of tie_word_embeddings."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"conv_bias": (None, False)}
    default_theta: ClassVar[float] = 1_000_000.0
    usual_experts: ClassVar[int] = 32
    balanced: ClassVar[bool] = False  # a bias balances the experts instead
    vocab_size: Vocabulary = 65_536
    hidden_size: Width = 2048
    intermediate_size: Width = 7168
    moe_intermediate_size: Width = 1792
    num_key_value_heads: Count = 8
    max_position_embeddings: Positions = 128_000
    hidden_act: Any = None  # ignored: it is the same in every model
    rms_norm_eps: Any = None  # ignored: norm_eps replaces it
    norm_eps: Epsilon = 1e-5
    tie_word_embeddings: bool = True
    tie_embedding: bool | None = None
    conv_L_cache: Annotated[int, Meta(ge=1, le=8)] = 3
    num_dense_layers: Annotated[int, Meta(ge=0)] = 2
    num_experts: ExpertCount = 32
    num_experts_per_tok: ChosenCount = 4
    use_expert_bias: bool = True
    routed_scaling_factor: AtLeast0 = 1.0
    norm_topk_prob: bool = True
    layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_types is None:
            raise ValueError("layer_types must be conv or full_attention for each layer; got none")
        _check_kinds(self.layer_types, self.num_hidden_layers)
        if self.tie_embedding is not None:
            self.tie_word_embeddings = self.tie_embedding

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of LFM2 with experts, which sigmoids choose; the first layers have an MLP."""
        layers = tuple(i >= self.num_dense_layers for i in range(self.num_hidden_layers))
        experts = Experts(
            self.num_experts,
            self.num_experts_per_tok,
            self.moe_intermediate_size,
            layers,
            self.norm_topk_prob,
            module="feed_forward.experts",
            router="feed_forward.gate",
            files="lfm2",
            sigmoid=True,
            correction="feed_forward.expert_bias" if self.use_expert_bias else "",
            normalize_eps=1e-6 if self.norm_topk_prob else 0.0,
            share_scale=self.routed_scaling_factor,
        )
        conv_layers = tuple(kind == "conv" for kind in self.layer_types or ())
        return {**_variant(self, conv_layers), "experts": experts if any(layers) else None}


def _check_kinds(listed: list[str] | None, layers: int) -> None:
    """Raise ValueError if `layer_types` has another number of layers or an unsupported kind."""
    check_layers("layer_types", listed, layers)
    for kind in listed or ():
        if kind not in ("conv", "full_attention"):
            raise ValueError(f"layer_types must be conv or full_attention; got {kind!r}")


def _variant(keys: Lfm2File | Lfm2MoeFile, conv_layers: tuple[bool, ...]) -> dict[str, Any]:
    """Return the fields common to LFM2's models (arXiv 2511.23404): most layers have a convolution for attention."""
    convolution = GatedConvolution(layers=conv_layers, channels=keys.hidden_size, width=keys.conv_L_cache)
    return {
        "hidden_act": "silu",
        "rms_norm_eps": keys.norm_eps,
        "qk_norm": True,
        "q_norm": "self_attn.q_layernorm",
        "k_norm": "self_attn.k_layernorm",
        "attention_norm": "operator_norm",
        "mlp_norm": "ffn_norm",
        "final_norm": "model.embedding_norm",
        "o_proj": "self_attn.out_proj",
        "gate_proj": "feed_forward.w1",
        "up_proj": "feed_forward.w3",
        "down_proj": "feed_forward.w2",
        "linear": convolution if any(conv_layers) else None,
    }
