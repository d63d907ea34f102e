"""Hy3: the keys of its config.json, and its differences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from wgrad.train.model.config_file import AtLeast0, Count, Epsilon, Positions, Vocabulary, Width, check_mlp_layer_types
from wgrad.train.model.expert_keys import ChosenCount, ExpertCount, ExpertsFile
from wgrad.train.model.experts import Experts
from wgrad.train.model.variants import layer_names, llama


class Hy3File(ExpertsFile, kw_only=True):
    """Keys of Hy3. Released files also state what every model has, in the keys of `unsupported`."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **dict.fromkeys(
            ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"), (None, True)
        ),
        "first_k_dense_replace": (None, 1),
    }
    count_keys: ClassVar[tuple[str, ...]] = ("num_local_experts", "num_experts")
    usual_experts: ClassVar[int] = 192
    balanced: ClassVar[bool] = False  # a bias balances the experts instead
    default_theta: ClassVar[float] = 11_158_840.0
    vocab_size: Vocabulary = 120_832
    intermediate_size: Width = 13_312
    num_hidden_layers: Count = 80
    num_attention_heads: Count = 64
    num_key_value_heads: Count = 8
    head_dim: Width = 128
    max_position_embeddings: Positions = 131_072
    rms_norm_eps: Epsilon = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    num_experts_per_tok: ChosenCount = 8
    num_experts: ExpertCount | None = None
    num_shared_experts: Annotated[int, Meta(ge=1, le=64)] = 1
    moe_intermediate_size: Width = 1536
    router_scaling_factor: AtLeast0 = 2.826
    mlp_layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_mlp_layer_types(self.mlp_layer_types, self.num_hidden_layers)

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of Hy3: norms of heads, and DeepSeek-V3's scores without groups."""
        kinds = self.mlp_layer_types or ["dense", *["sparse"] * (self.num_hidden_layers - 1)]
        layers = tuple(kind == "sparse" for kind in kinds)
        experts = Experts(
            self.experts,
            self.num_experts_per_tok,
            self.moe_intermediate_size,
            layers,
            files="hy3",
            shared_width=self.moe_intermediate_size * self.num_shared_experts,
            shared="mlp.shared_experts",
            shared_gate="",
            sigmoid=True,
            correction="mlp.e_score_correction_bias",
            share_scale=self.router_scaling_factor,
        )
        return {
            **llama(self),
            "qk_norm": True,
            "experts": experts if any(layers) else None,
            "file_names": layer_names(self.num_hidden_layers, {"mlp.shared_experts.": "mlp.shared_mlp."}),
        }
