"""The text model of Llama 4: the keys of its config.json, and its differences from Llama 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from wgrad.device.contract import PAGE
from wgrad.train.model.config_file import AtLeast0, Count, Epsilon, Positions, Vocabulary, Width, check_layers
from wgrad.train.model.expert_keys import ChosenCount, ExpertsFile
from wgrad.train.model.experts import Experts
from wgrad.train.model.variants import biases

_KINDS = ("chunked_attention", "full_attention")


class Llama4File(ExpertsFile, kw_only=True):
    """Keys of Llama 4.

    no_rope_layers: 1 for layers with rotary embeddings, despite its name. If it is missing or empty, every fourth layer
    has none. moe_layers: indices of the layers with experts. intermediate_size: width of an expert.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "num_experts_per_tok": (1,),
        "router_jitter_noise": (None, 0),
    }
    default_theta: ClassVar[float] = 500_000.0
    count_keys: ClassVar[tuple[str, ...]] = ("num_local_experts",)
    usual_experts: ClassVar[int] = 16
    balanced: ClassVar[bool] = False
    vocab_size: Vocabulary = 202_048
    hidden_size: Width = 5120
    intermediate_size: Width = 8192
    intermediate_size_mlp: Width = 16_384
    num_hidden_layers: Count = 48
    num_attention_heads: Count = 40
    num_key_value_heads: Count = 8
    head_dim: Width = 128
    max_position_embeddings: Positions = 131_072
    rms_norm_eps: Epsilon = 1e-5
    num_experts_per_tok: ChosenCount = 1
    moe_layers: list[int] | None = None
    interleave_moe_layer_step: Count = 1
    use_qk_norm: bool = True
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Count = 4
    attention_chunk_size: Positions | None = 8192
    layer_types: list[str] | None = None
    attn_temperature_tuning: bool | int = True
    floor_scale: Positions = 8192
    attn_scale: AtLeast0 = 0.1
    attention_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers("no_rope_layers", self.no_rope_layers or None, self.num_hidden_layers)
        chunk = self.attention_chunk_size or 0
        if chunk % PAGE and chunk < self.max_position_embeddings:
            raise ValueError(f"attention_chunk_size must be a multiple of {PAGE}, the tokens of a page; got {chunk}")
        check_layers("layer_types", self.layer_types, self.num_hidden_layers)
        if any(kind not in _KINDS for kind in self.layer_types or ()):
            raise ValueError(f"layer_types must be {' or '.join(_KINDS)}; got {sorted(set(self.layer_types or ()))}")

    @property
    def rotates(self) -> tuple[bool, ...]:
        """Return for each layer whether it has rotary embeddings."""
        if self.no_rope_layers:
            return tuple(bool(layer) for layer in self.no_rope_layers)
        return tuple((i + 1) % self.no_rope_layer_interval != 0 for i in range(self.num_hidden_layers))

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of Llama 4.

        Rotated heads are normed without weights, and each token has one expert, whose input is scaled.
        """
        first, every = self.interleave_moe_layer_step - 1, self.interleave_moe_layer_step
        sparse = range(first, self.num_hidden_layers, every) if self.moe_layers is None else self.moe_layers
        layers = tuple(i in sparse for i in range(self.num_hidden_layers))
        kinds = self.layer_types or [_KINDS[not rotates] for rotates in self.rotates]
        experts = Experts(
            self.experts,
            1,
            self.intermediate_size,
            layers,
            normalize=False,
            module="feed_forward.experts",
            router="feed_forward.router",
            files="llama4",
            shared_width=self.intermediate_size,
            shared="feed_forward.shared_expert",
            shared_gate="",
            sigmoid=True,
            scales_input=True,
            adapted=False,
        )
        return {
            **biases(self),
            "interleaved": True,
            "qk_norm": self.use_qk_norm,
            "qk_norm_last": True,
            "qk_norm_weight": False,
            "use_rope": self.rotates,
            "intermediate_size": self.intermediate_size_mlp,
            "gate_proj": "feed_forward.gate_proj",
            "up_proj": "feed_forward.up_proj",
            "down_proj": "feed_forward.down_proj",
            "chunk": self.attention_chunk_size or 0,
            "chunked": tuple(kind == _KINDS[0] for kind in kinds),
            "plain_growth": (self.attn_scale if self.attn_temperature_tuning else 0.0, self.floor_scale),
            "experts": experts if any(layers) else None,
        }
