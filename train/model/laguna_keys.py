"""Laguna: the keys of its config.json, and its differences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from wgrad.train.model.config_file import (
    AtLeast0,
    Count,
    Positions,
    RopeFile,
    Vocabulary,
    Width,
    check_layer_types,
    check_layers,
    check_mlp_layer_types,
    layer_windows,
)
from wgrad.train.model.expert_keys import ChosenCount, ExpertCount, ExpertsFile
from wgrad.train.model.experts import Experts
from wgrad.train.model.variants import biases, layer_names

_PER_HEAD, _PER_ELEMENT = "per-head", "per-element"


class LagunaFile(ExpertsFile, kw_only=True):
    """Keys of Laguna. Released files also state what every model has, in the keys of `unsupported`.

    gating: how many numbers gate attention's output; true and "per-head": one for each head.
    gating_types: the same for each layer, which must be equal.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "moe_apply_router_weight_on_input": (None, False),
        "moe_router_logit_softcapping": (None, 0),
        "norm_topk_prob": (None, True),
        "qkv_bias": (None, False),
        "swa_attention_sink_enabled": (None, False),
        "decoder_sparse_step": (None, 1),
    }
    usual_experts: ClassVar[int] = 256
    count_keys: ClassVar[tuple[str, ...]] = ("num_experts",)
    partial_rotary: ClassVar[bool] = True
    default_theta: ClassVar[float] = 500_000.0
    default_rope: ClassVar[RopeFile] = RopeFile(
        full_attention=RopeFile(rope_type="default", rope_theta=500_000.0, partial_rotary_factor=0.5),
        sliding_attention=RopeFile(rope_type="default", rope_theta=10_000.0),
    )
    vocab_size: Vocabulary = 100_352
    hidden_size: Width = 2048
    intermediate_size: Width = 8192
    num_hidden_layers: Count = 40
    num_attention_heads: Count = 48
    num_key_value_heads: Count = 8
    head_dim: Width = 128
    max_position_embeddings: Positions = 131_072
    attention_bias: bool = False
    gating: bool | str = True
    gating_types: list[str] | None = None
    num_attention_heads_per_layer: list[Count] | None = None
    sliding_window: Positions = 512
    layer_types: list[str] | None = None
    mlp_layer_types: list[str] | None = None
    mlp_only_layers: list[int] | None = None
    num_experts: ExpertCount = 256
    num_experts_per_tok: ChosenCount = 8
    moe_intermediate_size: Width = 512
    shared_expert_intermediate_size: Width = 512
    moe_routed_scaling_factor: AtLeast0 = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.partial_rotary_factor = None  # as in transformers, which reads it in rope_parameters alone
        layers = self.num_hidden_layers
        check_layer_types(self.layer_types, layers, self.sliding_window)
        check_mlp_layer_types(self.mlp_layer_types, layers)
        check_layers("num_attention_heads_per_layer", self.num_attention_heads_per_layer, layers)
        for heads in self.num_attention_heads_per_layer or ():
            if heads % self.num_key_value_heads:
                raise ValueError(
                    f"num_attention_heads_per_layer must have multiples of num_key_value_heads, "
                    f"{self.num_key_value_heads}; got {heads}"
                )
        for key, given in (("gating", [self.gating]), ("gating_types", self.gating_types or [])):
            for kind in given:
                if kind not in (True, _PER_HEAD, _PER_ELEMENT) or (kind == _PER_ELEMENT) != self.gates_elements:
                    raise ValueError(f"{key} must be {_PER_HEAD} or {_PER_ELEMENT} in all layers; got {kind!r}")
        dense = [i for i, kind in enumerate(self.mlps) if kind == "dense"]
        if self.mlp_only_layers is not None and self.mlp_only_layers != dense:
            raise ValueError(
                f"mlp_only_layers must be {dense}, as mlp_layer_types has it, or be missing; got {self.mlp_only_layers}"
            )

    @property
    def gates_elements(self) -> bool:
        """True if each element of attention's output has a gate, instead of each head."""
        return self.gating == _PER_ELEMENT

    @property
    def mlps(self) -> list[str]:
        """Kind of each layer's MLP, "dense" or "sparse"."""
        return self.mlp_layer_types or ["dense", *["sparse"] * (self.num_hidden_layers - 1)]

    @property
    def local_theta(self) -> float:
        return 10_000.0

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of Laguna, whose layers differ in their number of heads."""
        layers = tuple(kind == "sparse" for kind in self.mlps)
        experts = Experts(
            self.experts,
            self.num_experts_per_tok,
            self.moe_intermediate_size,
            layers,
            files="laguna",
            shared_width=self.shared_expert_intermediate_size,
            shared="mlp.shared_experts",
            shared_gate="",
            sigmoid=True,
            correction="mlp.gate.e_score_correction_bias",
            share_scale=self.moe_routed_scaling_factor,
        )
        heads = tuple(self.num_attention_heads_per_layer or ())
        return {
            **biases(self),
            "qk_norm": True,
            "heads": heads if any(count != self.num_attention_heads for count in heads) else (),
            "windows": layer_windows(self.layer_types, self.sliding_window, (False,) * self.num_hidden_layers),
            "attention_gate_proj": "self_attn.g_proj",
            "gate_of_heads": not self.gates_elements,
            "gate_softplus": True,
            "experts": experts if any(layers) else None,
            "file_names": layer_names(self.num_hidden_layers, {"mlp.shared_experts.": "mlp.shared_expert."}),
        }
