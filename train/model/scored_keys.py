"""Keys of config.json of families whose router corrects its scores by a bias, as DeepSeek-V3's does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from wgrad.train.model.config_file import (
    AtLeast0,
    Count,
    Epsilon,
    Positions,
    Vocabulary,
    Width,
    check_layer_types,
    check_mlp_layer_types,
    layer_windows,
)
from wgrad.train.model.expert_keys import ChosenCount, ExpertCount, ExpertsFile
from wgrad.train.model.family_keys import check_pattern

SharedCount = Annotated[int, Meta(ge=0, le=64)]


def check_groups(experts: int, groups: int, top_groups: int, chosen: int) -> None:
    """Raise ValueError if experts cannot be divided into these groups, or a token's groups have too few experts."""
    if experts % groups or (groups > 1 and experts < 2 * groups):
        raise ValueError(f"n_group must divide the {experts} experts into groups of two or more; got {groups}")
    if top_groups > groups or chosen > experts // groups * top_groups:
        raise ValueError(
            f"topk_group must be at most n_group, {groups}, and leave num_experts_per_tok, {chosen}, experts; got "
            f"{top_groups}"
        )


class ScoredFile(ExpertsFile, kw_only=True):
    """Keys of DeepSeek-V3's router and experts."""

    count_keys: ClassVar[tuple[str, ...]] = ("num_local_experts", "n_routed_experts")
    balanced: ClassVar[bool] = False  # the correction balances the experts instead
    n_routed_experts: ExpertCount | None = None
    n_shared_experts: SharedCount | None = None
    n_group: Count | None = 1
    topk_group: Count | None = 1
    first_k_dense_replace: Annotated[int, Meta(ge=0)] | None = 0
    moe_intermediate_size: Width = 1408
    norm_topk_prob: bool | None = True
    routed_scaling_factor: AtLeast0 = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self.experts, self.n_group or 1, self.topk_group or 1, self.num_experts_per_tok)

    def sparse_layers(self) -> tuple[bool, ...]:
        """Return for each layer whether it has experts."""
        return tuple(i >= (self.first_k_dense_replace or 0) for i in range(self.num_hidden_layers))


class Glm4MoeFile(ScoredFile, kw_only=True):
    usual_experts: ClassVar[int] = 128
    partial_rotary: ClassVar[bool] = True
    vocab_size: Vocabulary = 151_552
    intermediate_size: Width = 10_944
    num_hidden_layers: Count = 46
    num_attention_heads: Count = 96
    num_key_value_heads: Count = 8
    max_position_embeddings: Positions = 131_072
    rms_norm_eps: Epsilon = 1e-5
    partial_rotary_factor: AtLeast0 | None = 0.5
    attention_bias: bool = False
    n_shared_experts: SharedCount = 1
    n_group: Count = 1
    topk_group: Count = 1
    num_experts_per_tok: ChosenCount = 8
    first_k_dense_replace: Annotated[int, Meta(ge=0)] = 1
    norm_topk_prob: bool = True
    use_qk_norm: bool = False
    num_mtp_layers: Annotated[int, Meta(ge=0, le=64)] | None = None
    num_nextn_predict_layers: Annotated[int, Meta(ge=0, le=64)] | None = 1


class SolarOpenFile(ScoredFile, kw_only=True):
    """Keys of Solar Open, whose layers all have experts."""

    usual_experts: ClassVar[int] = 128
    default_theta: ClassVar[float] = 1_000_000.0
    vocab_size: Vocabulary = 196_608
    intermediate_size: Any = None  # ignored: no layer has a plain MLP
    num_hidden_layers: Count = 48
    num_attention_heads: Count = 64
    num_key_value_heads: Count = 8
    head_dim: Width = 128
    max_position_embeddings: Positions = 131_072
    rms_norm_eps: Epsilon = 1e-5
    attention_bias: bool = False
    n_shared_experts: SharedCount = 1
    n_group: Count = 1
    topk_group: Count = 1
    num_experts_per_tok: ChosenCount = 8
    moe_intermediate_size: Width = 1280
    norm_topk_prob: bool = True

    def sparse_layers(self) -> tuple[bool, ...]:
        return (True,) * self.num_hidden_layers


class Dots1File(ScoredFile, kw_only=True):
    vocab_size: Vocabulary = 152_064
    hidden_size: Width = 4608
    intermediate_size: Width = 10_944
    num_hidden_layers: Count = 62
    num_key_value_heads: Count | None = 32
    attention_bias: bool = False
    norm_topk_prob: bool | None = False
    sliding_window: Positions | None = 4096
    max_window_layers: Annotated[int, Meta(ge=0)] = 62
    layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_types(self.layer_types, self.num_hidden_layers, self.sliding_window)

    def windows(self) -> tuple[int, ...]:
        """Return each layer's window, 0 for none."""
        unlisted = (i >= self.max_window_layers for i in range(self.num_hidden_layers))
        return layer_windows(self.layer_types, self.sliding_window, unlisted)


class ExaoneMoeFile(ScoredFile, kw_only=True):
    """Keys of K-EXAONE. mlp_layer_types: "sparse" or "dense" for each layer, instead of first_k_dense_replace."""

    usual_experts: ClassVar[int] = 64
    count_keys: ClassVar[tuple[str, ...]] = ("num_experts",)
    vocab_size: Vocabulary = 102_400
    intermediate_size: Width = 16_384
    num_key_value_heads: Count = 32
    rms_norm_eps: Epsilon = 1e-5
    num_experts: ExpertCount = 64
    num_shared_experts: SharedCount = 1
    num_experts_per_tok: ChosenCount = 8
    first_k_dense_replace: Annotated[int, Meta(ge=0)] = 1
    mlp_layer_types: list[str] | None = None
    moe_intermediate_size: Width = 1024
    n_group: Count = 1
    topk_group: Count = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: AtLeast0 = 2.5
    sliding_window: Positions = 4096
    sliding_window_pattern: Annotated[int, Meta(ge=0)] | str | None = 4
    layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        self.n_shared_experts = self.num_shared_experts
        super().__post_init__()
        check_layer_types(self.layer_types, self.num_hidden_layers, self.sliding_window)
        check_pattern(self.layer_types, self.sliding_window, self.sliding_window_pattern)
        check_mlp_layer_types(self.mlp_layer_types, self.num_hidden_layers)

    def windows(self, unlisted: Iterable[bool]) -> tuple[int, ...]:
        """Return each layer's window, 0 for none. unlisted: which layers slide if `layer_types` is missing."""
        return layer_windows(self.layer_types, self.sliding_window, unlisted)

    def sparse_layers(self) -> tuple[bool, ...]:
        if self.mlp_layer_types is None:
            return super().sparse_layers()
        return tuple(kind == "sparse" for kind in self.mlp_layer_types)


class Ernie45MoeFile(ExpertsFile, kw_only=True):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"moe_norm_min": (1e-12,), "moe_gate": ("topk",)}
    default_theta: ClassVar[float] = 500_000.0
    usual_experts: ClassVar[int] = 64
    count_keys: ClassVar[tuple[str, ...]] = ("num_experts", "moe_num_experts")
    vocab_size: Vocabulary = 103_424
    hidden_size: Width = 2560
    intermediate_size: Width = 12_288
    num_hidden_layers: Count = 28
    num_attention_heads: Count = 20
    num_key_value_heads: Count | None = 4
    max_position_embeddings: Positions = 131_072
    rms_norm_eps: Epsilon = 1e-5
    tie_word_embeddings: bool = True
    use_bias: bool | None = False
    moe_intermediate_size: Width = 1536
    moe_num_experts: ExpertCount | None = None
    moe_k: ChosenCount | None = None
    num_experts_per_tok: ChosenCount | None = None  # type: ignore[assignment]
    moe_num_shared_experts: SharedCount | None = 2
    moe_layer_start_index: Annotated[int, Meta(ge=0)] | None = 1
    moe_layer_end_index: Annotated[int, Meta(ge=-1)] | None = -1
    moe_layer_interval: Count | None = 1

    def __post_init__(self) -> None:
        self.num_experts_per_tok = self.num_experts_per_tok or self.moe_k or 6
        super().__post_init__()

    def sparse_layers(self) -> tuple[bool, ...]:
        """Return for each layer whether it has experts."""
        last = -1 if self.moe_layer_end_index is None else self.moe_layer_end_index
        last, first = (self.num_hidden_layers - 1 if last == -1 else last), self.moe_layer_start_index or 0
        every = self.moe_layer_interval or 1
        return tuple((i + 1) % every == 0 and first <= i <= last for i in range(self.num_hidden_layers))
