"""Flint and Kolibri 1: the keys of their config.json, and their differences.

Both have Qwen3's attention with rotary embeddings in layers with a window alone, and a shared expert without a gate.
"""

from __future__ import annotations

from typing import Any, ClassVar

from wgrad.train.model.config_file import (
    Count,
    Positions,
    Vocabulary,
    Width,
    check_layer_types,
    layer_windows,
)
from wgrad.train.model.expert_keys import ChosenCount, ExpertCount, ExpertsFile, Qwen3MoeFile
from wgrad.train.model.experts import Experts
from wgrad.train.model.variants import biases, layer_names


class FlintFile(Qwen3MoeFile, kw_only=True):
    count_keys: ClassVar[tuple[str, ...]] = ("num_experts",)
    usual_experts: ClassVar[int] = 256
    use_sliding_window: Any = None  # ignored: layer_types has the windows
    vocab_size: Vocabulary = 150_144
    num_hidden_layers: Count = 49
    head_dim: Width = 128
    max_position_embeddings: Positions = 262_144
    sliding_window: Positions = 513
    layer_types: list[str] | None = None
    moe_intermediate_size: Width = 512
    shared_expert_intermediate_size: Width = 1024
    num_experts_per_tok: ChosenCount = 6
    norm_topk_prob: bool = True
    router_aux_loss_coef: float | None = 0.0005

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_types(self.layer_types, self.num_hidden_layers, self.sliding_window)
        if self.mlp_only_layers is None:
            self.mlp_only_layers = [0, 1]

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of Flint: sinks, and sigmoid scores without a correction."""
        layers, last = self.sparse_layers(), self.num_hidden_layers - 1
        slides = (i > 1 and i % 4 != 1 and i != last for i in range(self.num_hidden_layers))
        windows = layer_windows(self.layer_types, self.sliding_window, slides)
        experts = Experts(
            self.experts,
            self.num_experts_per_tok,
            self.moe_intermediate_size,
            layers,
            self.norm_topk_prob,
            shared_width=self.shared_expert_intermediate_size,
            shared_gate="",
            sigmoid=True,
        )
        return {
            **biases(self),
            "qk_norm": True,
            "windows": windows,
            "use_rope": tuple(window > 0 for window in windows),
            "sinks": True,
            "experts": experts if any(layers) else None,
            "file_names": layer_names(self.num_hidden_layers, {"self_attn.sinks": "self_attn.softmax_offset"}),
        }


class Kolibri1File(ExpertsFile, kw_only=True):
    usual_experts: ClassVar[int] = 384
    balanced: ClassVar[bool] = False  # a bias balances the experts instead
    count_keys: ClassVar[tuple[str, ...]] = ("num_local_experts", "num_experts")
    vocab_size: Vocabulary = 128_000
    hidden_size: Width = 2560
    intermediate_size: Any = None  # ignored: no layer has a plain MLP
    num_hidden_layers: Count = 50
    num_attention_heads: Count = 48
    num_key_value_heads: Count = 4
    head_dim: Width = 128
    max_position_embeddings: Positions = 262_144
    sliding_window: Positions | None = 513
    layer_types: list[str] | None = None
    num_experts: ExpertCount | None = None
    num_experts_per_tok: ChosenCount = 6
    moe_intermediate_size: Width = 512
    shared_expert_intermediate_size: Width = 512
    norm_topk_prob: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layer_types(self.layer_types, self.num_hidden_layers, self.sliding_window)
        if self.sliding_window is None and self.layer_types is None:
            raise ValueError("sliding_window must be a number where layer_types is missing; got none")

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of Kolibri 1: norms of outputs, and a correction of logits."""
        slides = ((i + 1) % 5 != 0 for i in range(self.num_hidden_layers))
        windows = layer_windows(self.layer_types, self.sliding_window, slides)
        experts = Experts(
            self.experts,
            self.num_experts_per_tok,
            self.moe_intermediate_size,
            (True,) * self.num_hidden_layers,
            self.norm_topk_prob,
            files="kolibri1",
            shared_width=self.shared_expert_intermediate_size,
            shared="mlp.shared_experts",
            shared_gate="",
            sigmoid=True,
            correction="mlp.gate.e_score_correction_bias",
            corrects_logits=True,
        )
        norms = {"attention_out_norm": "post_self_attn_layernorm", "mlp_out_norm": "post_mlp_layernorm"}
        in_files = {"post_self_attn_layernorm.": "post_attn_norm.", "post_mlp_layernorm.": "post_ffn_norm."}
        return {
            **norms,
            "intermediate_size": self.moe_intermediate_size,
            "qk_norm": True,
            "windows": windows,
            "use_rope": tuple(self.sliding_window is None or window > 0 for window in windows),
            "experts": experts,
            "file_names": layer_names(self.num_hidden_layers, in_files),
        }
