"""Cohere 2 with experts: the keys of its config.json, and its differences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from wgrad.train.model.config_file import (
    Count,
    Epsilon,
    Factor,
    Positions,
    Vocabulary,
    Width,
    check_layer_types,
    check_mlp_layer_types,
    layer_windows,
)
from wgrad.train.model.expert_keys import ExpertCount, ExpertsFile
from wgrad.train.model.experts import Experts
from wgrad.train.model.scored_keys import SharedCount
from wgrad.train.model.variants import shared_layer_norm


class Cohere2MoeFile(ExpertsFile, kw_only=True):
    """Keys of Cohere 2 with experts.

    first_k_dense_replace: number of first layers that have an MLP instead of experts, if mlp_layer_types is missing.
    prefix_dense_sliding_window_pattern gives the windows of these layers.
    """

    usual_experts: ClassVar[int] = 8
    balanced: ClassVar[bool] = False
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "shared_expert_combination_strategy": ("average", "sum"),
        "expert_selection_fn": ("softmax", "sigmoid"),
        "rope_scaling": (None, {}),  # transformers reads only rope_parameters here
    }
    vocab_size: Vocabulary = 256_000
    hidden_size: Width = 8192
    intermediate_size: Width = 22_528
    num_hidden_layers: Count = 40
    num_attention_heads: Count = 64
    head_dim: Width = 128
    max_position_embeddings: Positions = 8192
    rms_norm_eps: Epsilon | None = None  # type: ignore[assignment]
    layer_norm_eps: Epsilon = 1e-5
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    logit_scale: Factor = 0.0625
    sliding_window: Positions | None = 4096
    sliding_window_pattern: Count = 4
    prefix_dense_sliding_window_pattern: Count = 1
    prefix_dense_intermediate_size: Width | None = None
    first_k_dense_replace: Annotated[int, Meta(ge=0)] | None = 0
    layer_types: list[str] | None = None
    mlp_layer_types: list[str] | None = None
    num_experts: ExpertCount = 8
    num_shared_experts: SharedCount = 0
    shared_expert_combination_strategy: str = "average"
    expert_selection_fn: str = "softmax"
    norm_topk_prob: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_types(self.layer_types, self.num_hidden_layers, self.sliding_window)
        check_mlp_layer_types(self.mlp_layer_types, self.num_hidden_layers)

    @property
    def dense(self) -> tuple[bool, ...]:
        """Return for each layer whether it has an MLP instead of experts."""
        if self.mlp_layer_types is not None:
            return tuple(kind == "dense" for kind in self.mlp_layer_types)
        return tuple(i < (self.first_k_dense_replace or 0) for i in range(self.num_hidden_layers))

    @property
    def windows(self) -> tuple[int, ...]:
        first = min(self.first_k_dense_replace or 0, self.num_hidden_layers)
        patterns = [self.prefix_dense_sliding_window_pattern] * first
        unlisted = [(i + 1) % pattern != 0 for i, pattern in enumerate(patterns)]
        unlisted += [(i + 1) % self.sliding_window_pattern != 0 for i in range(self.num_hidden_layers - first)]
        return layer_windows(self.layer_types, self.sliding_window, unlisted)

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of Cohere 2 with experts, whose norms may be RMSNorm."""
        dense, windows = self.dense, self.windows
        half = 0.5 if self.num_shared_experts and self.shared_expert_combination_strategy == "average" else 1.0
        sigmoid = self.expert_selection_fn == "sigmoid"
        experts = Experts(
            self.num_experts,
            self.num_experts_per_tok,
            self.intermediate_size,
            tuple(not layer for layer in dense),
            self.norm_topk_prob or not sigmoid,
            shared_width=self.intermediate_size * self.num_shared_experts,
            shared="mlp.shared_experts",
            shared_gate="",
            sigmoid=sigmoid,
            share_scale=half,
            shared_scale=half,
        )
        always = self.prefix_dense_sliding_window_pattern == 1
        norms = {} if self.rms_norm_eps is None else {"layer_norm": False, "rms_norm_eps": self.rms_norm_eps}
        return {
            **shared_layer_norm(self),
            **norms,
            "windows": windows,
            "use_rope": tuple(window > 0 or (layer and always) for window, layer in zip(windows, dense)),
            "intermediate_size": self.prefix_dense_intermediate_size or self.intermediate_size,
            "experts": experts if not all(dense) else None,
        }
