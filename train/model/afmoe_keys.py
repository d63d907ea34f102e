"""AfMoE (Arcee's Trinity): the keys of its config.json, and its differences."""

from __future__ import annotations

from collections.abc import Mapping
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
    layer_windows,
)
from wgrad.train.model.expert_keys import ChosenCount, ExpertCount, ExpertsFile
from wgrad.train.model.experts import Experts
from wgrad.train.model.scored_keys import SharedCount
from wgrad.train.model.variants import biases


class AfmoeFile(ExpertsFile, kw_only=True):
    """Keys of AfMoE. Released files also state how the router scores, which is the same in every model."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "score_func": (None, "sigmoid"),
        "route_norm": (None, True),
        **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), (None, 1)),
    }
    usual_experts: ClassVar[int] = 64
    balanced: ClassVar[bool] = False  # a bias balances the experts instead
    vocab_size: Vocabulary = 200_192
    hidden_size: Width = 2048
    intermediate_size: Width = 6144
    moe_intermediate_size: Width = 1408
    num_dense_layers: Annotated[int, Meta(ge=0)] = 1
    num_attention_heads: Count = 16
    head_dim: Width | None = 128
    max_position_embeddings: Positions = 16_384
    rms_norm_eps: Epsilon = 1e-5
    num_experts: ExpertCount = 64
    num_experts_per_tok: ChosenCount = 6
    num_shared_experts: SharedCount = 2
    route_scale: AtLeast0 = 1.0
    global_attn_every_n_layers: Count = 4
    sliding_window: Positions | None = 1024
    layer_types: list[str] | None = None
    mup_enabled: bool | None = False
    attention_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_types(self.layer_types, self.num_hidden_layers, self.sliding_window)

    @property
    def slides(self) -> tuple[bool, ...]:
        """Return whether each layer has the window; only those have rotary embeddings."""
        if self.layer_types is not None:
            return tuple(kind == "sliding_attention" for kind in self.layer_types)
        return tuple((i + 1) % self.global_attn_every_n_layers != 0 for i in range(self.num_hidden_layers))

    def variant(self) -> dict[str, Any]:
        """Return the options of Trinity: norms before and after both halves of a layer, and a gate of attention."""
        layers = tuple(i >= self.num_dense_layers for i in range(self.num_hidden_layers))
        experts = Experts(
            self.num_experts,
            self.num_experts_per_tok,
            self.moe_intermediate_size,
            layers,
            router="mlp.router.gate",
            files="afmoe",
            shared_width=self.moe_intermediate_size * self.num_shared_experts,
            shared="mlp.shared_experts",
            shared_gate="",
            sigmoid=True,
            correction="mlp.expert_bias",
            share_scale=self.route_scale,
        )
        return {
            **biases(self),
            "qk_norm": True,
            "attention_gate_proj": "self_attn.gate_proj",
            "attention_out_norm": "post_attention_layernorm",
            "mlp_norm": "pre_mlp_layernorm",
            "mlp_out_norm": "post_mlp_layernorm",
            "windows": layer_windows(self.layer_types, self.sliding_window, self.slides),
            "use_rope": self.slides,
            "embedding_scale": self.hidden_size**0.5 if self.mup_enabled else 1.0,
            "experts": experts if any(layers) else None,
        }
