"""Keys of config.json of the families with a mixture of experts."""

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
    RopeFile,
    Vocabulary,
    Width,
    check_layer_types,
    check_mlp_layer_types,
    layer_windows,
)
from wgrad.train.model.family_keys import GraniteWindows

ExpertCount = Annotated[int, Meta(ge=0, le=1024)]
ChosenCount = Annotated[int, Meta(ge=1, le=64)]
_LOCAL_FIRST = ("num_local_experts", "num_experts")


class ExpertsFile(ConfigFile, kw_only=True):
    """Keys of families with a mixture of experts, under either of transformers 5's names.

    Attributes:
        usual_experts: Number of experts if the file does not give it.
        count_keys: Keys that give it: that of transformers' class behind its other names, which overwrite it. The first
            that the file has counts.
        may_be_none: Whether 0 experts make every layer dense; else there must be one.
        balanced: Whether transformers adds a load-balancing loss if it returns the router's logits.
    """

    usual_experts: ClassVar[int] = 8
    count_keys: ClassVar[tuple[str, ...]] = ("num_experts", "num_local_experts")
    may_be_none: ClassVar[bool] = False
    balanced: ClassVar[bool] = True
    num_experts: ExpertCount | None = None
    num_local_experts: ExpertCount | None = None
    num_experts_per_tok: ChosenCount = 2
    output_router_logits: bool | None = False
    router_aux_loss_coef: AtLeast0 | None = 0.001

    def __post_init__(self) -> None:
        if not self.experts and not self.may_be_none:
            key = next(key for key in self.count_keys if getattr(self, key) is not None)
            raise ValueError(f"{key} must be at least 1; got 0")
        if self.experts and self.num_experts_per_tok > self.experts:
            raise ValueError(
                f"num_experts_per_tok must be at most the number of experts, {self.experts}; got "
                f"{self.num_experts_per_tok}"
            )

    @property
    def experts(self) -> int:
        counts = (getattr(self, key) for key in self.count_keys)
        return next((count for count in counts if count is not None), self.usual_experts)

    @property
    def balance(self) -> float:
        """Return the weight of the load-balancing loss, which transformers uses if it returns the router's logits."""
        return self.router_aux_loss_coef or 0.0 if self.output_router_logits and self.balanced else 0.0


class MixtralFile(ExpertsFile, kw_only=True):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"router_jitter_noise": (None, 0)}
    default_theta: ClassVar[float] = 1_000_000.0
    intermediate_size: Width = 14_336
    num_key_value_heads: Count = 8
    max_position_embeddings: Positions = 131_072
    rms_norm_eps: Epsilon = 1e-5
    sliding_window: Positions | None = None


class MiniMaxM2File(ExpertsFile, kw_only=True):
    """Keys of MiniMax-M2. rotary_dim: rotated elements of a head. Released files also state what every model has."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "router_jitter_noise": (None, 0),
        "use_qk_norm": (None, True),
        "qk_norm_type": (None, "per_layer"),
        "scoring_func": (None, "sigmoid"),
        "use_routing_bias": (None, True),
        "shared_intermediate_size": (None, 0),
    }
    default_theta: ClassVar[float] = 5_000_000.0
    usual_experts: ClassVar[int] = 256
    partial_rotary: ClassVar[bool] = True
    vocab_size: Vocabulary = 200_064
    hidden_size: Width = 3072
    intermediate_size: Width = 1536
    num_hidden_layers: Count = 62
    num_attention_heads: Count = 48
    num_key_value_heads: Count = 8
    head_dim: Width = 128
    max_position_embeddings: Positions = 196_608
    num_experts_per_tok: ChosenCount = 8
    rotary_dim: Width | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rotary_dim is not None and self.partial_rotary_factor is None:
            self.partial_rotary_factor = self.rotary_dim / self.head_dim


class OlmoeFile(ExpertsFile, kw_only=True):
    count_keys: ClassVar[tuple[str, ...]] = _LOCAL_FIRST
    router_aux_loss_coef: AtLeast0 | None = 0.01
    usual_experts: ClassVar[int] = 64
    vocab_size: Vocabulary = 50_304
    hidden_size: Width = 2048
    intermediate_size: Width = 2048
    num_hidden_layers: Count = 16
    num_attention_heads: Count = 16
    max_position_embeddings: Positions = 4096
    rms_norm_eps: Epsilon = 1e-5
    attention_bias: bool = False
    num_experts_per_tok: ChosenCount = 8
    norm_topk_prob: bool = False
    clip_qkv: Factor | None = None


class FlexOlmoFile(ExpertsFile, kw_only=True):
    count_keys: ClassVar[tuple[str, ...]] = _LOCAL_FIRST
    router_aux_loss_coef: AtLeast0 | None = 0.01
    default_theta: ClassVar[float] = 500_000.0
    usual_experts: ClassVar[int] = 7
    vocab_size: Vocabulary = 100_352
    max_position_embeddings: Positions = 4096
    attention_bias: bool = False
    num_experts_per_tok: ChosenCount = 5
    norm_topk_prob: bool = False


class HunYuanMoeFile(ExpertsFile, kw_only=True):
    """Keys of Hunyuan-A13B. Lists have an entry for each layer, and all entries must be equal. An expert is as wide as
    the shared one."""

    count_keys: ClassVar[tuple[str, ...]] = _LOCAL_FIRST
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "use_qk_norm": (True,), "mlp_bias": (None, False), "moe_layer_num_skipped": (None, 0),
        "use_mixed_mlp_moe": (None, True),
    }  # fmt: skip
    usual_experts: ClassVar[int] = 1
    balanced: ClassVar[bool] = False
    vocab_size: Vocabulary = 290_943
    rms_norm_eps: Epsilon = 1e-5
    attention_bias: bool = False
    num_experts: ExpertCount | list[ExpertCount] | None = None  # type: ignore[assignment]
    num_experts_per_tok: ChosenCount | None = None  # type: ignore[assignment]
    moe_topk: ChosenCount | list[ChosenCount] | None = None
    moe_intermediate_size: Width | list[Width] | None = None
    num_shared_expert: int | list[int] | None = None

    def __post_init__(self) -> None:
        self.num_experts = self._same("num_experts")
        chosen = self._same("moe_topk")
        self.num_experts_per_tok = self.num_experts_per_tok or chosen or 1
        super().__post_init__()
        for key, wanted in (("moe_intermediate_size", self.intermediate_size), ("num_shared_expert", 1)):
            if self._same(key) not in (None, wanted):
                raise ValueError(f"{key} must be {wanted} in all layers, as transformers has it; got {self._same(key)}")

    def _same(self, key: str) -> Any:
        """Return the number that all layers have. Raise ValueError if they differ."""
        value = getattr(self, key)
        if isinstance(value, list):
            if len(set(value)) > 1:
                raise ValueError(f"{key} must be the same in all layers; got {sorted(set(value))}")
            return value[0] if value else None
        return value


class Qwen3MoeFile(ExpertsFile, kw_only=True):
    count_keys: ClassVar[tuple[str, ...]] = _LOCAL_FIRST
    may_be_none: ClassVar[bool] = True
    usual_experts: ClassVar[int] = 128
    vocab_size: Vocabulary = 151_936
    hidden_size: Width = 2048
    intermediate_size: Width = 6144
    num_hidden_layers: Count = 24
    num_key_value_heads: Count = 4
    max_position_embeddings: Positions = 32_768
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: Positions | None = 4096
    decoder_sparse_step: Annotated[int, Meta(ge=1)] = 1
    mlp_only_layers: list[int] | None = None
    moe_intermediate_size: Width = 768
    num_experts_per_tok: ChosenCount = 8
    norm_topk_prob: bool = False

    def sparse_layers(self) -> tuple[bool, ...]:
        """Layers that have experts."""
        dense, some = self.mlp_only_layers or [], self.experts > 0
        return tuple(
            some and i not in dense and (i + 1) % self.decoder_sparse_step == 0 for i in range(self.num_hidden_layers)
        )


class Qwen2MoeFile(Qwen3MoeFile, kw_only=True):
    """Keys of Qwen2-MoE: those of Qwen3-MoE, of a shared expert, and of sliding layers.

    transformers 5 writes 0 as sliding_window if use_sliding_window is false.
    """

    count_keys: ClassVar[tuple[str, ...]] = ("num_experts",)
    usual_experts: ClassVar[int] = 60
    attention_bias: Any = None  # ignored: qkv_bias replaces it
    intermediate_size: Width = 5632
    num_attention_heads: Count = 16
    num_key_value_heads: Count | None = 16  # type: ignore[assignment]
    sliding_window: Annotated[int, Meta(ge=0, le=1 << 31)] | None = 4096
    max_window_layers: Annotated[int, Meta(ge=0)] = 28
    layer_types: list[str] | None = None
    moe_intermediate_size: Width = 1408
    shared_expert_intermediate_size: Width = 5632
    num_experts_per_tok: ChosenCount = 4
    qkv_bias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_types(self.layer_types, self.num_hidden_layers, self.window)

    @property
    def window(self) -> int | None:
        """Return the tokens of a window; None if no layer has one."""
        return self.sliding_window or None if self.use_sliding_window else None

    def windows(self) -> tuple[int, ...]:
        """Return each layer's window, 0 for none. Every second layer slides if `layer_types` is missing."""
        unlisted = (i % 2 == 0 and i < self.max_window_layers for i in range(self.num_hidden_layers))
        return layer_windows(self.layer_types, self.window, unlisted)


class GraniteMoeFile(ExpertsFile, kw_only=True):
    count_keys: ClassVar[tuple[str, ...]] = ("num_local_experts",)
    attention_bias: bool = False
    embedding_multiplier: Factor = 1.0
    attention_multiplier: Factor = 1.0
    residual_multiplier: Factor = 1.0
    logits_scaling: Factor = 1.0


class GraniteMoeSharedFile(GraniteMoeFile, kw_only=True):
    shared_intermediate_size: Annotated[int, Meta(ge=0, le=1 << 22)] = 0


class GptOssFile(ExpertsFile, kw_only=True):
    default_theta: ClassVar[float] = 150_000.0
    default_rope: ClassVar[RopeFile] = RopeFile(
        rope_type="yarn",
        factor=32.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
        original_max_position_embeddings=4096,
    )
    usual_experts: ClassVar[int] = 128
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"hidden_act": ("silu",)}
    vocab_size: Vocabulary = 201_088
    hidden_size: Width = 2880
    intermediate_size: Width = 2880
    num_hidden_layers: Count = 36
    num_attention_heads: Count = 64
    num_key_value_heads: Count = 8
    head_dim: Width = 64
    max_position_embeddings: Positions = 131_072
    rms_norm_eps: Epsilon = 1e-5
    sliding_window: Positions | None = 128
    layer_types: list[str] | None = None
    attention_bias: bool = True
    num_experts_per_tok: ChosenCount = 4
    swiglu_alpha: AtLeast0 = 1.702
    swiglu_limit: Factor = 7.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_types(self.layer_types, self.num_hidden_layers, self.sliding_window)

    @property
    def windows(self) -> tuple[int, ...]:
        """Return each layer's window, 0 for none. Every second layer has none if `layer_types` is missing."""
        unlisted = (i % 2 == 0 for i in range(self.num_hidden_layers))
        return layer_windows(self.layer_types, self.sliding_window, unlisted)


class GraniteMoeSwaFile(GraniteWindows, GraniteMoeSharedFile, kw_only=True):
    """Keys of Granite with a shared expert, windows and sinks."""

    sliding_window: Positions | None = 128
    layer_types: list[str] | None = None
    layer_rope_theta: list[AtLeast0] | None = None

    def __post_init__(self) -> None:
        GraniteMoeSharedFile.__post_init__(self)
        self.check_windows()


class MellumFile(ExpertsFile, kw_only=True):
    """Keys of Mellum 2. mlp_layer_types: "sparse" or "dense" for each layer; if it is missing, all are sparse."""

    count_keys: ClassVar[tuple[str, ...]] = _LOCAL_FIRST
    usual_experts: ClassVar[int] = 64
    default_rope: ClassVar[RopeFile] = RopeFile(
        full_attention=RopeFile(rope_type="default", rope_theta=500_000.0),
        sliding_attention=RopeFile(rope_type="default", rope_theta=10_000.0),
    )
    vocab_size: Vocabulary = 98_304
    hidden_size: Width = 2304
    intermediate_size: Width = 7168
    num_hidden_layers: Count = 28
    num_key_value_heads: Count = 4
    head_dim: Width = 128
    max_position_embeddings: Positions = 131_072
    attention_bias: bool = False
    sliding_window: Positions | None = 1024
    num_experts_per_tok: ChosenCount = 8
    moe_intermediate_size: Width = 896
    norm_topk_prob: bool = True
    layer_types: list[str] | None = None
    mlp_layer_types: list[str] | None = None
    num_mtp_layers: Annotated[int, Meta(ge=0, le=1)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_types(self.layer_types, self.num_hidden_layers, self.sliding_window)
        check_mlp_layer_types(self.mlp_layer_types, self.num_hidden_layers)

    @property
    def local_theta(self) -> float:
        return 10_000.0

    def sparse_layers(self) -> tuple[bool, ...]:
        """Layers that have experts."""
        return tuple(kind == "sparse" for kind in self.mlp_layer_types or ["sparse"] * self.num_hidden_layers)


class PhimoeFile(ExpertsFile, kw_only=True):
    """Keys of Phi-3.5-MoE.

    router_jitter_noise: relative distance from the best logit up to which an expert counts in the best's softmax.
    input_jitter_noise, as dropout, is for training alone.
    short_mscale, long_mscale: factors of the rotary embedding, which are equal in released models.
    """

    count_keys: ClassVar[tuple[str, ...]] = ("num_local_experts",)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"num_experts_per_tok": (2,)}
    dropouts: ClassVar[Mapping[str, float]] = {"attention_dropout": 0.0, "input_jitter_noise": 0.0}
    usual_experts: ClassVar[int] = 16
    default_theta: ClassVar[float] = 1_000_000.0
    vocab_size: Vocabulary = 32_064
    intermediate_size: Width = 6400
    num_key_value_heads: Count = 8
    max_position_embeddings: Positions = 131_072
    rms_norm_eps: Epsilon = 1e-5
    sliding_window: Positions | None = None
    router_jitter_noise: AtLeast0 = 0.01
    attention_bias: bool = False
    lm_head_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for rope in (self.rope_scaling, self.rope_parameters):
            if rope is None or (rope.rope_type or rope.type or "default") == "default":
                continue
            if rope.short_mscale is None or rope.short_mscale != rope.long_mscale:
                raise ValueError(
                    "rope_scaling: short_mscale and long_mscale must be one number; got "
                    f"{rope.short_mscale} and {rope.long_mscale}"
                )
            if (rope.rope_type or rope.type) not in ("longrope", "su"):
                raise ValueError(f"rope_scaling: type must be longrope; got {rope.rope_type or rope.type!r}")
            rope.attention_factor = rope.short_mscale
