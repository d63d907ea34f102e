"""Keys of config.json of the families with gated DeltaNet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from msgspec import UNSET, UnsetType

from wgrad.train.model.config_file import (
    AtLeast0,
    ConfigFile,
    Count,
    Positions,
    RopeFile,
    Theta,
    Vocabulary,
    Width,
    check_layers,
)
from wgrad.train.model.expert_keys import ChosenCount, Qwen3MoeFile

_KINDS = ("linear_attention", "full_attention")


def check_delta_net(keys: Any) -> None:
    """Raise ValueError if a key of the layers with gated DeltaNet asks for something unsupported."""
    check_layers("layer_types", keys.layer_types, keys.num_hidden_layers)
    for kind in keys.layer_types or ():
        if kind not in _KINDS:
            raise ValueError(f"layer_types must be {' or '.join(_KINDS)}; got {kind!r}")
    if keys.hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act must be silu, which the short convolutions have too; got {keys.hidden_act!r}")
    if keys.linear_key_head_dim > 256:
        raise ValueError(f"linear_key_head_dim must be at most 256; got {keys.linear_key_head_dim}")
    heads, key_heads = keys.linear_num_value_heads, keys.linear_num_key_heads
    if heads % key_heads:
        raise ValueError(f"linear_num_value_heads must be a multiple of linear_num_key_heads, {key_heads}; got {heads}")


def linear_layers(keys: Any) -> tuple[bool, ...]:
    """Return whether each layer has gated DeltaNet."""
    if keys.layer_types is not None:
        return tuple(kind == "linear_attention" for kind in keys.layer_types)
    return tuple((i + 1) % keys.full_attention_interval != 0 for i in range(keys.num_hidden_layers))


class Qwen35File(ConfigFile, kw_only=True):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"attn_output_gate": (True,)}
    partial_rotary: ClassVar[bool] = True
    vocab_size: Vocabulary = 248_320
    intermediate_size: Width = 12_288
    num_attention_heads: Count = 16
    num_key_value_heads: Count = 4
    head_dim: Width = 256
    max_position_embeddings: Positions = 32_768
    partial_rotary_factor: AtLeast0 | None = 0.25
    attention_bias: bool = False
    linear_conv_kernel_dim: Count = 4
    linear_key_head_dim: Count = 128
    linear_value_head_dim: Count = 128
    linear_num_key_heads: Count = 16
    linear_num_value_heads: Count = 32
    layer_types: list[str] | None = None
    full_attention_interval: Count = 4

    def __post_init__(self) -> None:
        check_delta_net(self)


class Qwen3NextFile(Qwen3MoeFile, kw_only=True):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "attn_output_gate": (True,),
        "use_sliding_window": (None, False),
    }
    count_keys: ClassVar[tuple[str, ...]] = ("num_experts",)
    usual_experts: ClassVar[int] = 512
    partial_rotary: ClassVar[bool] = True
    use_sliding_window: Any = None  # ignored, as the next one: no layer has a window
    sliding_window: Any = None
    intermediate_size: Width = 5632
    num_hidden_layers: Count = 48
    num_attention_heads: Count = 16
    num_key_value_heads: Count = 2
    head_dim: Width = 256
    partial_rotary_factor: AtLeast0 | None = 0.25
    moe_intermediate_size: Width = 512
    shared_expert_intermediate_size: Width = 512
    num_experts_per_tok: ChosenCount = 10
    norm_topk_prob: bool = True
    linear_conv_kernel_dim: Count = 4
    linear_key_head_dim: Count = 128
    linear_value_head_dim: Count = 128
    linear_num_key_heads: Count = 16
    linear_num_value_heads: Count = 32
    layer_types: list[str] | None = None
    full_attention_interval: Count = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_delta_net(self)


class Qwen35MoeFile(Qwen3NextFile, kw_only=True):
    """Keys of Qwen3.5 with experts, which all layers have. A token's weights of experts add up to 1."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **Qwen3NextFile.unsupported,
        "norm_topk_prob": (None, True),
        "decoder_sparse_step": (None, 1),
        "mlp_only_layers": (None, []),
    }
    usual_experts: ClassVar[int] = 256
    vocab_size: Vocabulary = 248_320
    intermediate_size: Any = None  # ignored: no layer has a plain MLP
    num_hidden_layers: Count = 40
    num_experts_per_tok: ChosenCount = 8


class _NullableRope(RopeFile):
    """Keys whose theta may be null, which is not the same as a missing theta."""

    rope_theta: Theta | None | UnsetType = UNSET  # type: ignore[assignment]


class OlmoHybridFile(ConfigFile, kw_only=True):
    """Keys of OLMo Hybrid. Missing sizes of gated DeltaNet follow from the others. If theta is null, layers with
    attention have no rotary embeddings."""

    vocab_size: Vocabulary = 100_352
    hidden_size: Width = 3840
    num_attention_heads: Count = 30
    max_position_embeddings: Positions = 65_536
    attention_bias: bool = False
    rope_theta: Theta | None | UnsetType = UNSET  # type: ignore[assignment]
    rope_parameters: _NullableRope | None = None
    rope_scaling: _NullableRope | None = None
    linear_conv_kernel_dim: Count = 4
    linear_key_head_dim: Width | None = None
    linear_value_head_dim: Width | None = None
    linear_num_key_heads: Count | None = None
    linear_num_value_heads: Count | None = None
    linear_allow_neg_eigval: bool = True
    layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        self.linear_num_key_heads = self.linear_num_key_heads or self.num_attention_heads
        self.linear_num_value_heads = self.linear_num_value_heads or self.num_attention_heads
        if self.linear_key_head_dim is None:
            self.linear_key_head_dim = int(0.75 * self.hidden_size / self.linear_num_key_heads)
        self.linear_value_head_dim = self.linear_value_head_dim or 2 * self.linear_key_head_dim
        if self.layer_types is None:
            kinds = [_KINDS[i % 4 == 3] for i in range(self.num_hidden_layers)]
            self.layer_types = kinds if _KINDS[1] in kinds else [*kinds[:-1], _KINDS[1]]
        check_delta_net(self)
        if len(set(self.layer_types)) < 2:
            raise ValueError(f"layer_types must have both {' and '.join(_KINDS)}; got only {self.layer_types[0]}")

    @property
    def rotates(self) -> bool:
        """Return whether layers with attention have rotary embeddings."""
        given = self.rope_scaling or self.rope_parameters
        theta = UNSET if given is None else given.rope_theta
        return (self.rope_theta if theta is UNSET else theta) is not None
