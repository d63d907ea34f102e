"""As family_keys.py, of families with gated DeltaNet."""

from __future__ import annotations

from typing import ClassVar

from wgrad.train.model.config_file import AtLeast0, ConfigFile, Count, Positions, Vocabulary, Width, check_layers

_KINDS = ("linear_attention", "full_attention")


class Qwen35File(ConfigFile, kw_only=True):
    partial_rotary: ClassVar[bool] = True
    vocab_size: Vocabulary = 248_320
    intermediate_size: Width = 12_288
    num_attention_heads: Count = 16
    num_key_value_heads: Count = 4
    head_dim: Width = 256
    max_position_embeddings: Positions = 32_768
    partial_rotary_factor: AtLeast0 | None = 0.25
    attention_bias: bool = False
    attn_output_gate: bool = True
    linear_conv_kernel_dim: Count = 4
    linear_key_head_dim: Count = 128
    linear_value_head_dim: Count = 128
    linear_num_key_heads: Count = 16
    linear_num_value_heads: Count = 32
    layer_types: list[str] | None = None
    full_attention_interval: Count = 4

    def __post_init__(self) -> None:
        check_layers("layer_types", self.layer_types, self.num_hidden_layers)
        for kind in self.layer_types or ():
            if kind not in _KINDS:
                raise ValueError(f"layer_types must be {' or '.join(_KINDS)}; got {kind!r}")
        if not self.attn_output_gate:
            raise ValueError("attn_output_gate must be true: attention without it is not built here; got false")
        if self.hidden_act not in ("silu", "swish"):
            raise ValueError(f"hidden_act must be silu, which the short convolutions have too; got {self.hidden_act!r}")
        if self.linear_key_head_dim > 256:
            raise ValueError(f"linear_key_head_dim must be at most 256; got {self.linear_key_head_dim}")
        heads, key_heads = self.linear_num_value_heads, self.linear_num_key_heads
        if heads % key_heads:
            raise ValueError(
                f"linear_num_value_heads must be a multiple of linear_num_key_heads, {key_heads}; got {heads}"
            )

    @property
    def linear_layers(self) -> tuple[bool, ...]:
        """True for each layer that has gated DeltaNet."""
        if self.layer_types is not None:
            return tuple(kind == "linear_attention" for kind in self.layer_types)
        return tuple((i + 1) % self.full_attention_interval != 0 for i in range(self.num_hidden_layers))
