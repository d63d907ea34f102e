"""A.X K1: the keys of its config.json, and its differences from DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from wgrad.train.model.config_file import Count, Positions, Vocabulary, Width, check_mlp_layer_types
from wgrad.train.model.latent_keys import DeepseekV3File
from wgrad.train.model.variants import layer_names


class AxK1File(DeepseekV3File, kw_only=True):
    """Keys of A.X K1. transformers reads no `topk_method`: released files have no corrections of scores."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"scoring_func": (None, "sigmoid")}
    usual_experts: ClassVar[int] = 192
    vocab_size: Vocabulary = 163_840
    num_attention_heads: Count = 64
    num_key_value_heads: Count = 64
    max_position_embeddings: Positions = 32_768
    first_k_dense_replace: Annotated[int, Meta(ge=0)] = 1
    q_lora_rank: Width = 1536
    moe_layer_freq: Count = 1
    mlp_layer_types: list[str] | None = None
    num_nextn_predict_layers: Annotated[int, Meta(ge=0, le=64)] | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_mlp_layer_types(self.mlp_layer_types, self.num_hidden_layers)

    def sparse_layers(self) -> tuple[bool, ...]:
        """Return for each layer whether it has experts."""
        if self.mlp_layer_types is not None:
            return tuple(kind == "sparse" for kind in self.mlp_layer_types)
        first, step = self.first_k_dense_replace, self.moe_layer_freq
        return tuple(i >= first and i % step == 0 for i in range(self.num_hidden_layers))

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of A.X K1: DeepSeek-V3 with a norm of the output of layers with experts."""
        usual, norm = super().variant(), "post_mlp_layernorm"
        if usual["experts"] is None:
            return usual
        return usual | {
            "experts": replace(usual["experts"], may_be_uncorrected=True),
            "mlp_out_norm": f"mlp.{norm}",
            "norms_dense_out": False,
            "file_names": layer_names(self.num_hidden_layers, {f"mlp.{norm}.": f"{norm}."}),
        }
