"""Gemma 3n and 4: the keys of their config.json, and their differences from Llama."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from wgrad.train.model.altup import AltUp
from wgrad.train.model.config_file import (
    Count,
    Factor,
    LayerTypesFile,
    Positions,
    RopeFile,
    Theta,
    Vocabulary,
    Width,
    check_layers,
)
from wgrad.train.model.expert_keys import ChosenCount, ExpertCount
from wgrad.train.model.experts import Experts
from wgrad.train.model.per_layer import PerLayer

_KINDS = ("sliding_attention", "full_attention")
_SHAPE = ("head_dim", "num_key_value_heads")  # keys that per_layer_config may set


def sources_of_keys(kinds: Sequence[str], shared: int) -> tuple[int, ...]:
    """Return for each layer the index of the layer whose keys and values it uses.

    The last `shared` layers use those of the last layer of their kind before all of them; others use their own.

    Raises:
        ValueError: There is no such layer.
    """
    own = len(kinds) - shared
    sources = {kind: i for i, kind in enumerate(kinds[:own])}
    for kind in kinds[own:]:
        if kind not in sources:
            raise ValueError(
                f"num_kv_shared_layers must leave a layer of {kind}, whose keys and values the others use; got "
                f"{shared} of {len(kinds)} layers"
            )
    return tuple(i if i < own else sources[kind] for i, kind in enumerate(kinds))


class SharedKeysFile(LayerTypesFile, kw_only=True):
    """Keys common to Gemma 3n and 4."""

    hidden_act: Any = None  # ignored: hidden_activation replaces it
    hidden_activation: str = "gelu_pytorch_tanh"
    head_dim: Width = 256
    num_attention_heads: Count = 8
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    sliding_window: Positions = 512
    vocab_size_per_layer_input: Vocabulary = 262_144
    hidden_size_per_layer_input: Annotated[int, Meta(ge=0, le=1 << 22)] = 256
    num_kv_shared_layers: Annotated[int, Meta(ge=0, le=1 << 12)] = 0
    # Without layer_types, every full_of-th layer has no window, and with ends_full neither has the last.
    full_of: ClassVar[int] = 6
    ends_full: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_kv_shared_layers >= self.num_hidden_layers:
            raise ValueError(
                f"num_kv_shared_layers must be below the {self.num_hidden_layers} layers (num_hidden_layers); got "
                f"{self.num_kv_shared_layers}"
            )
        sources_of_keys(self.kinds, self.num_kv_shared_layers)

    @property
    def kinds(self) -> list[str]:
        """Kind of each layer's attention, one of _KINDS."""
        if self.layer_types is not None:
            return [_KINDS[kind != "sliding_attention"] for kind in self.layer_types]
        layers = self.num_hidden_layers
        return [_KINDS[(i + 1) % self.full_of == 0 or self.ends_full and i == layers - 1] for i in range(layers)]

    @property
    def local_theta(self) -> float:
        return 10_000.0

    @property
    def common(self) -> dict[str, Any]:
        """Fields of `ModelConfig` that are common to Gemma 3n and 4."""
        per_layer = PerLayer(self.vocab_size_per_layer_input, self.hidden_size_per_layer_input, self.vocab_size)
        return {
            "qkv_bias": self.attention_bias,
            "o_bias": self.attention_bias,
            "hidden_act": self.hidden_activation,
            "embedding_scale": self.hidden_size**0.5,
            "score_scale": 1.0,
            "qk_norm": True,
            "value_norm": True,
            "windows": tuple(self.sliding_window if kind == _KINDS[0] else 0 for kind in self.kinds),
            "kv_sources": sources_of_keys(self.kinds, self.num_kv_shared_layers),
            "attention_out_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_out_norm": "post_feedforward_layernorm",
            "per_layer": per_layer if per_layer.width else None,
        }


class Gemma3nFile(SharedKeysFile, kw_only=True):
    """Keys of Gemma 3n. altup_coef_clip is not applied: transformers clips AltUp's coefficients to it in training, but
    they are far smaller."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "altup_active_idx": (0,), "altup_correct_scale": (True,),
    }  # fmt: skip
    default_theta: ClassVar[float] = 1_000_000.0
    full_of: ClassVar[int] = 5
    ends_full: ClassVar[bool] = False
    vocab_size: Vocabulary = 262_400
    hidden_size: Width = 2048
    intermediate_size: Width | list[Width] = 16_384  # type: ignore[assignment]
    num_hidden_layers: Count = 35
    num_key_value_heads: Count = 2
    max_position_embeddings: Positions = 32_768
    final_logit_softcapping: Factor = 30.0
    hidden_size_per_layer_input: Width = 256
    num_kv_shared_layers: Annotated[int, Meta(ge=0, le=1 << 12)] = 15
    rope_local_base_freq: Theta | None = None
    altup_num_inputs: Annotated[int, Meta(ge=2, le=16)] = 4
    altup_coef_clip: Factor = 120.0
    laurel_rank: Width = 64
    activation_sparsity_pattern: list[Annotated[float, Meta(ge=0, lt=1)]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers("activation_sparsity_pattern", self.activation_sparsity_pattern, self.num_hidden_layers)
        check_layers("intermediate_size", self.widths, self.num_hidden_layers)

    @property
    def widths(self) -> list[int]:
        """Width of each layer's MLP."""
        given = self.intermediate_size
        return given if isinstance(given, list) else [given] * self.num_hidden_layers

    @property
    def local_theta(self) -> float:
        return self.rope_local_base_freq or 10_000.0

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of Gemma 3n: AltUp, LAuReL and sparse activations."""
        layers = self.num_hidden_layers
        usual = [0.95 if i < 10 < layers else 0.0 for i in range(layers)]
        return {
            **self.common,
            "intermediate_size": max(self.widths),
            "mlp_widths": tuple(self.widths),
            "logit_softcap": self.final_logit_softcapping or 0.0,
            "altup": AltUp(self.altup_num_inputs, self.laurel_rank, tuple(self.activation_sparsity_pattern or usual)),
        }


class Gemma4File(SharedKeysFile, kw_only=True):
    """Keys of Gemma 4.

    global_head_dim and num_global_key_value_heads apply to layers without a window. transformers 5.23 writes
    per_layer_config instead, with the shapes of layers by index, which has as many digits as the last layer's ("04").
    use_bidirectional_attention: "vision" concerns only images.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"rope_scaling": (None,)}
    some_have_experts: ClassVar[bool] = True
    default_theta: ClassVar[float] = 1_000_000.0
    default_rope: ClassVar[RopeFile] = RopeFile(
        full_attention=RopeFile(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1_000_000.0),
        sliding_attention=RopeFile(rope_type="default", rope_theta=10_000.0),
    )
    vocab_size: Vocabulary = 262_144
    hidden_size: Width = 2304
    intermediate_size: Width = 9216
    num_hidden_layers: Count = 30
    num_key_value_heads: Count = 4
    max_position_embeddings: Positions = 131_072
    final_logit_softcapping: Factor | None = None
    use_bidirectional_attention: str | None = None
    attention_k_eq_v: bool = False
    use_double_wide_mlp: bool = False
    global_head_dim: Width = 512
    num_global_key_value_heads: Count | None = None
    per_layer_config: dict[str, dict[str, Width]] | None = None
    enable_moe_block: bool = False
    num_experts: ExpertCount | None = None
    top_k_experts: ChosenCount | None = None
    moe_intermediate_size: Width | None = None

    def __post_init__(self) -> None:
        if self.layer_types:  # as transformers does, whatever the file says
            self.layer_types[-1] = "full_attention"
        super().__post_init__()
        if self.use_bidirectional_attention not in (None, "vision"):
            raise ValueError(
                f"use_bidirectional_attention must be null or vision: attention of text is causal here; got "
                f"{self.use_bidirectional_attention!r}"
            )
        if self.global_head_dim % 2:
            raise ValueError(f"global_head_dim must be even, for rotary embeddings; got {self.global_head_dim}")
        others = {key for shape in (self.per_layer_config or {}).values() for key in shape} - {*_SHAPE}
        if others:
            raise ValueError(f"per_layer_config must have {' and '.join(_SHAPE)} alone; got {min(others)!r}")
        for index in self.per_layer_config or {}:
            if not (index.isascii() and index.isdigit() and int(index) < self.num_hidden_layers):
                raise ValueError(f"per_layer_config must name layers by their index; got {index!r}")
        if self.enable_moe_block:
            self._check_experts()
        dims = self.layer_shapes("head_dim")
        for kind in _KINDS:
            if len(found := sorted({width for width, own in zip(dims, self.kinds) if own == kind})) > 1:
                raise ValueError(f"per_layer_config must give all layers of {kind} one head_dim; got {found}")

    def _check_experts(self) -> None:
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            if not getattr(self, key):
                raise ValueError(f"enable_moe_block must come with {key}, a number above 0; got {getattr(self, key)}")
        if (self.top_k_experts or 0) > (self.num_experts or 0):
            raise ValueError(f"top_k_experts must be at most num_experts, {self.num_experts}; got {self.top_k_experts}")

    @property
    def experts(self) -> Experts | None:
        """Experts, which every layer has alongside its MLP; None without them."""
        if not self.enable_moe_block:
            return None
        assert self.num_experts and self.top_k_experts and self.moe_intermediate_size
        layers, normed = (True,) * self.num_hidden_layers, "feedforward_layernorm"
        return Experts(
            self.num_experts,
            self.top_k_experts,
            self.moe_intermediate_size,
            layers,
            module="experts",
            router="router.proj",
            files="gemma4",
            norms=(f"post_{normed}_1", f"pre_{normed}_2", f"post_{normed}_2"),
            router_scale="router.scale",
            share_scales="router.per_expert_scale",
        )

    def layer_shapes(self, key: str) -> tuple[int, ...]:
        """Return each layer's value of `key`, which is head_dim or num_key_value_heads."""
        usual = getattr(self, key)
        if self.per_layer_config is not None:
            own = {int(index): shape.get(key, usual) for index, shape in self.per_layer_config.items()}
            return tuple(own.get(layer, usual) for layer in range(self.num_hidden_layers))
        heads = self.num_global_key_value_heads if self.attention_k_eq_v else None
        full = {"head_dim": self.global_head_dim, "num_key_value_heads": heads or usual}[key]
        return tuple(full if kind == _KINDS[1] else usual for kind in self.kinds)

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of Gemma 4: two head sizes, keys as values, and a scale per layer output."""
        shared = [source != i for i, source in enumerate(self.common["kv_sources"])]
        wide = [2 if self.use_double_wide_mlp and other else 1 for other in shared]
        return {
            **self.common,
            "head_dims": self.layer_shapes("head_dim"),
            "kv_heads": self.layer_shapes("num_key_value_heads"),
            "mlp_widths": tuple(self.intermediate_size * times for times in wide),
            "keys_as_values": tuple(self.attention_k_eq_v and kind == _KINDS[1] for kind in self.kinds),
            "layer_scale": True,
            "experts": self.experts,
            "logit_softcap": self.final_logit_softcapping or 0.0,
        }


class Gemma4UnifiedFile(Gemma4File, kw_only=True):
    """Keys of the text part of Gemma 4's models without encoders."""

    max_position_embeddings: Positions = 262_144
    sliding_window: Positions = 1024
    hidden_size_per_layer_input: Annotated[int, Meta(ge=0, le=0)] = 0
