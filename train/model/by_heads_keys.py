"""GPT-NeoX and Falcon: the keys of their config.json, and their differences from Llama.

One projection has queries, keys and values, with the rows of each key head and of its queries together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from wgrad.train.model.config_file import ConfigFile, Count, Epsilon, Factor, Positions, Theta, Vocabulary, Width


class ByHeadsFile(ConfigFile, kw_only=True):
    """Keys common to GPT-NeoX and Falcon, whose heads have hidden_size / num_attention_heads numbers."""

    num_key_value_heads: Any = None  # ignored
    rms_norm_eps: Any = None  # ignored: the epsilon of LayerNorm replaces it

    def __post_init__(self) -> None:
        heads = self.num_attention_heads
        if self.hidden_size % heads or self.head_dim not in (None, self.hidden_size // heads):
            raise ValueError(
                f"head_dim must be hidden_size / num_attention_heads, a whole number; got {self.head_dim} and "
                f"{self.hidden_size} / {heads}"
            )

    @property
    def attention_sizes(self) -> tuple[int, int, int]:
        heads = self.num_attention_heads
        return heads, self.key_heads, self.hidden_size // heads

    @property
    def key_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.num_attention_heads


class GptNeoxFile(ByHeadsFile, kw_only=True):
    """Keys of GPT-NeoX. As in transformers, only rope_parameters replace rotary_pct and rotary_emb_base."""

    partial_rotary: ClassVar[bool] = True
    dropouts: ClassVar[Mapping[str, float]] = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    vocab_size: Vocabulary = 50_432
    hidden_size: Width = 6144
    intermediate_size: Width = 24_576
    num_hidden_layers: Count = 44
    num_attention_heads: Count = 64
    hidden_act: str = "gelu"
    layer_norm_eps: Epsilon = 1e-5
    rope_theta: Any = None  # ignored, as the next one
    partial_rotary_factor: Any = None
    rotary_emb_base: Theta = 10_000.0
    rotary_pct: Factor = 0.25
    use_parallel_residual: bool = True
    attention_bias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rope_theta, self.partial_rotary_factor = self.rotary_emb_base, self.rotary_pct
        given, width = self.rope_scaling or self.rope_parameters, self.hidden_size // self.num_attention_heads
        rotated = int(width * self.rotary_pct)
        if (given is None or given.partial_rotary_factor is None) and (rotated % 2 or not 2 <= rotated <= width):
            raise ValueError(
                f"rotary_pct must leave an even number of a head's {width} numbers to be rotated, 2 at least; got "
                f"{self.rotary_pct}"
            )

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of GPT-NeoX (arXiv 2204.06745) and Pythia (arXiv 2304.01373)."""
        return {
            "layer_norm": True,
            "rms_norm_eps": self.layer_norm_eps,
            "gated": False,
            "parallel": self.use_parallel_residual,
            "qkv_proj": "attention.query_key_value",
            "o_proj": "attention.dense",
            "up_proj": "mlp.dense_h_to_4h",
            "down_proj": "mlp.dense_4h_to_h",
            "qkv_bias": self.attention_bias,
            "o_bias": self.attention_bias,
            "mlp_bias": True,
            "final_norm": "model.final_layer_norm",
            "embedding": "model.embed_in",
            "file_names": (
                ("model.embed_tokens.", ("gpt_neox.embed_in.",)),
                ("model.", ("gpt_neox.",)),
                ("lm_head.", ("embed_out.",)),
            ),
        }


class FalconFile(ByHeadsFile, kw_only=True):
    """Keys of Falcon: of its first architecture (7B) and of the new one (40B, 180B and Falcon 2).

    multi_query and parallel_attn concern the first, num_kv_heads and num_ln_in_parallel_attn the new one.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "apply_residual_connection_post_layernorm": (None, False),
    }
    dropouts: ClassVar[Mapping[str, float]] = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    vocab_size: Vocabulary = 65_024
    hidden_size: Width = 4544
    n_embed: Width | None = None  # older name of hidden_size
    intermediate_size: Any = None  # ignored: ffn_hidden_size replaces it
    ffn_hidden_size: Width | None = None
    num_attention_heads: Count = 71
    num_kv_heads: Count | None = None
    hidden_act: Any = None  # ignored: activation replaces it
    activation: str = "gelu"
    max_position_embeddings: Positions = 2048
    layer_norm_epsilon: Epsilon = 1e-5
    new_decoder_architecture: bool | None = False
    multi_query: bool | None = True
    parallel_attn: bool | None = True
    num_ln_in_parallel_attn: int | None = None
    bias: bool | None = False
    alibi: bool | None = False
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        self.hidden_size = self.n_embed or self.hidden_size
        super().__post_init__()
        if self.new_decoder_architecture and not self.parallel_attn:
            raise ValueError("parallel_attn must be true with new_decoder_architecture; got false")
        norms = self.num_ln_in_parallel_attn
        if norms not in ((None, 1, 2) if self.new_decoder_architecture else (None, 1)):
            allowed = "1 or 2" if self.new_decoder_architecture else "1 without new_decoder_architecture"
            raise ValueError(f"num_ln_in_parallel_attn must be {allowed}; got {norms}")
        every = not self.new_decoder_architecture and not self.multi_query
        if every and self.num_kv_heads not in (None, self.num_attention_heads):
            raise ValueError(f"num_kv_heads must be num_attention_heads without multi_query; got {self.num_kv_heads}")

        if self.alibi and self.key_heads != self.num_attention_heads:
            raise ValueError(
                f"alibi must be false unless each head has its own keys; got true with {self.key_heads} heads of keys"
            )

    @property
    def key_heads(self) -> int:
        shared = self.multi_query and not self.new_decoder_architecture
        return 1 if shared else self.num_kv_heads or self.num_attention_heads

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of Falcon (arXiv 2311.16867)."""
        two = bool(self.new_decoder_architecture) and self.num_ln_in_parallel_attn != 1
        mlp_norm = "input_layernorm" if self.parallel_attn else "post_attention_layernorm"
        bias = bool(self.bias)
        return {
            "hidden_act": self.activation,
            "layer_norm": True,
            "rms_norm_eps": self.layer_norm_epsilon,
            "gated": False,
            "intermediate_size": self.ffn_hidden_size or 4 * self.hidden_size,
            "alibi": bool(self.alibi),
            "use_rope": (not self.alibi,) * self.num_hidden_layers,
            "parallel": bool(self.parallel_attn),
            "attention_norm": "ln_attn" if two else "input_layernorm",
            "mlp_norm": "ln_mlp" if two else mlp_norm,
            "qkv_proj": "self_attention.query_key_value",
            "o_proj": "self_attention.dense",
            "up_proj": "mlp.dense_h_to_4h",
            "down_proj": "mlp.dense_4h_to_h",
            "qkv_bias": bias,
            "o_bias": bias,
            "mlp_bias": bias,
            "final_norm": "model.ln_f",
            "embedding": "model.word_embeddings",
            "file_names": (
                ("model.embed_tokens.", ("transformer.word_embeddings.",)),
                ("model.layers.", ("transformer.h.",)),
                ("model.", ("transformer.",)),
            ),
        }
