"""GPT-2, GPT-BigCode, GPT-J, GPT-Neo and OPT: the keys of their config.json, and their differences from Llama.

All but GPT-J have embeddings of positions instead of rotary embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from wgrad.train.model.config_file import ConfigFile, Count, Epsilon, Positions, Vocabulary, Width, check_layers

# `ModelConfig` fields that name tensors of GPT-2, and of GPT-Neo where they are called the same.
_GPT2_NAMES: Mapping[str, Any] = {
    "position_table": "model.wpe",
    "up_proj": "mlp.c_fc",
    "down_proj": "mlp.c_proj",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "final_norm": "model.ln_f",
    "embedding": "model.wte",
    "file_names": (
        ("model.embed_tokens.", ("transformer.wte.", "wte.")),
        ("model.layers.", ("transformer.h.", "h.")),
        ("model.ln_f.", ("transformer.ln_f.", "ln_f.")),
        ("model.wpe.", ("transformer.wpe.", "wpe.")),
    ),
}
_KINDS = ("global", "local")  # of layers of GPT-Neo, without and with a window


class LearnedPositionsFile(ConfigFile, kw_only=True):
    """Keys common to these families. Heads have hidden_size / num_attention_heads numbers."""

    intermediate_size: Any = None  # ignored, as the next ones
    num_key_value_heads: Any = None
    head_dim: Any = None
    hidden_act: Any = None
    rms_norm_eps: Any = None
    rope_theta: Any = None
    rope_parameters: Any = None
    rope_scaling: Any = None
    partial_rotary_factor: Any = None
    activation_function: str = "gelu_new"
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        self.rope_theta = self.rope_parameters = self.rope_scaling = self.partial_rotary_factor = None
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads, {self.num_attention_heads}; got "
                f"{self.hidden_size}"
            )

    @property
    def attention_sizes(self) -> tuple[int, int, int]:
        heads = self.num_attention_heads
        return heads, heads, self.hidden_size // heads

    def variant(self) -> dict[str, Any]:
        """Return the fields of `ModelConfig` common to these families."""
        return {
            "hidden_act": self.activation_function,
            "layer_norm": True,
            "gated": False,
            "use_rope": (False,) * self.num_hidden_layers,
        }


class Gpt2File(LearnedPositionsFile, kw_only=True):
    """Keys of GPT-2. As in transformers, Llama's names of four keys count before GPT-2's own."""

    dropouts: ClassVar[Mapping[str, float]] = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    vocab_size: Vocabulary = 50_257
    n_embd: Width = 768
    n_layer: Count = 12
    n_head: Count = 12
    n_positions: Positions = 1024
    n_inner: Width | None = None
    hidden_size: Width | None = None  # type: ignore[assignment]
    num_hidden_layers: Count | None = None  # type: ignore[assignment]
    num_attention_heads: Count | None = None  # type: ignore[assignment]
    max_position_embeddings: Positions | None = None  # type: ignore[assignment]
    layer_norm_epsilon: Epsilon = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False  # ignored: scores are in float32

    def __post_init__(self) -> None:
        self.hidden_size = self.hidden_size or self.n_embd
        self.num_hidden_layers = self.num_hidden_layers or self.n_layer
        self.num_attention_heads = self.num_attention_heads or self.n_head
        self.max_position_embeddings = self.max_position_embeddings or self.n_positions
        super().__post_init__()

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of GPT-2 (Radford et al., 2019)."""
        assert self.hidden_size
        return {
            **super().variant(),
            "rms_norm_eps": self.layer_norm_epsilon,
            "intermediate_size": self.n_inner or 4 * self.hidden_size,
            "score_scale": 0.0 if self.scale_attn_weights else 1.0,
            "score_scale_by_layer": self.scale_attn_by_inverse_layer_idx,
            **_GPT2_NAMES,
            "transposed": True,
            "qkv_proj": "attn.c_attn",
            "qkv_by_heads": False,
            "o_proj": "attn.c_proj",
            "qkv_bias": True,
            "o_bias": True,
            "mlp_bias": True,
        }


class GptJFile(Gpt2File, kw_only=True):
    """Keys of GPT-J, which has rotary embeddings. rotary_dim: how many numbers of a head are rotated."""

    partial_rotary: ClassVar[bool] = True
    dropouts: ClassVar[Mapping[str, float]] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    vocab_size: Vocabulary = 50_400
    n_embd: Width = 4096
    n_layer: Count = 28
    n_head: Count = 16
    n_positions: Positions = 2048
    tie_word_embeddings: bool = False
    scale_attn_weights: Any = None  # ignored, as the next one
    scale_attn_by_inverse_layer_idx: Any = None
    rotary_dim: Width = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        width = self.attention_sizes[2]
        if self.rotary_dim % 2 or self.rotary_dim > width:
            raise ValueError(f"rotary_dim must be even and at most {width}, a head's numbers; got {self.rotary_dim}")
        part = self.rotary_dim / width
        # As a factor, of which the product with the width must not lie below rotary_dim.
        self.partial_rotary_factor = part if int(width * part) == self.rotary_dim else math.nextafter(part, 1.0)

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of GPT-J (Wang and Komatsuzaki, 2021)."""
        assert self.hidden_size and self.num_hidden_layers
        return {
            **LearnedPositionsFile.variant(self),
            "rms_norm_eps": self.layer_norm_epsilon,
            "intermediate_size": self.n_inner or 4 * self.hidden_size,
            "use_rope": (True,) * self.num_hidden_layers,
            "interleaved": True,
            "parallel": True,
            "attention": "attn",
            "o_proj": "attn.out_proj",
            "up_proj": "mlp.fc_in",
            "down_proj": "mlp.fc_out",
            "attention_norm": "ln_1",
            "mlp_norm": "ln_1",
            "mlp_bias": True,
            "head_bias": True,
            "final_norm": "model.ln_f",
            "embedding": "model.wte",
            "file_names": (
                ("model.embed_tokens.", ("transformer.wte.",)),
                ("model.layers.", ("transformer.h.",)),
                ("model.", ("transformer.",)),
            ),
        }


class GptNeoFile(LearnedPositionsFile, kw_only=True):
    """Keys of GPT-Neo. As in transformers, Llama's names of two keys count before its own.

    attention_types: kinds of consecutive layers, with how often they are repeated.
    attention_layers: the kind of each layer, which counts before attention_types.
    """

    dropouts: ClassVar[Mapping[str, float]] = dict.fromkeys(
        ("resid_dropout", "embed_dropout", "attention_dropout"), 0.0
    )
    vocab_size: Vocabulary = 50_257
    hidden_size: Width = 2048
    num_layers: Count = 24
    num_heads: Count = 16
    num_hidden_layers: Count | None = None  # type: ignore[assignment]
    num_attention_heads: Count | None = None  # type: ignore[assignment]
    intermediate_size: Width | None = None
    max_position_embeddings: Positions = 2048
    window_size: Positions = 256
    attention_types: list[tuple[list[str], Count]] | None = None
    attention_layers: list[str] | None = None
    layer_norm_epsilon: Epsilon = 1e-5

    def __post_init__(self) -> None:
        self.num_hidden_layers = self.num_hidden_layers or self.num_layers
        self.num_attention_heads = self.num_attention_heads or self.num_heads
        super().__post_init__()
        key = "attention_types" if self.attention_layers is None else "attention_layers"
        check_layers(key, self.kinds, self.num_hidden_layers)
        if unknown := sorted({*self.kinds} - {*_KINDS}):
            raise ValueError(f"{key} must be {' or '.join(_KINDS)}; got {unknown}")

    @property
    def kinds(self) -> list[str]:
        """Return the kind of each layer."""
        if self.attention_layers is not None:
            return self.attention_layers
        types = [([*_KINDS], 12)] if self.attention_types is None else self.attention_types
        return [kind for kinds, times in types for _ in range(times) for kind in kinds]

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of GPT-Neo (Black et al., 2021), whose scores are not scaled."""
        return {
            **super().variant(),
            "rms_norm_eps": self.layer_norm_epsilon,
            "intermediate_size": self.intermediate_size or 4 * self.hidden_size,
            "windows": tuple(self.window_size if kind == _KINDS[1] else 0 for kind in self.kinds),
            "score_scale": 1.0,
            **_GPT2_NAMES,
            "attention": "attn.attention",
            "o_proj": "attn.attention.out_proj",
            "o_bias": True,
            "mlp_bias": True,
        }


class GptBigCodeFile(Gpt2File, kw_only=True):
    """Keys of GPT-BigCode. multi_query: whether all heads share one head of keys and values."""

    activation_function: str = "gelu_pytorch_tanh"
    multi_query: bool = True
    attention_softmax_in_fp32: bool = True  # ignored, as the next one: the softmax is in float32
    scale_attention_softmax_in_fp32: bool = True
    scale_attn_by_inverse_layer_idx: Any = None  # ignored

    @property
    def attention_sizes(self) -> tuple[int, int, int]:
        heads, _, width = super().attention_sizes
        return heads, 1 if self.multi_query else heads, width

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of GPT-BigCode (arXiv 2301.03988)."""
        return {**super().variant(), "transposed": False, "qkv_by_heads": True, "score_scale_by_layer": False}


class OptFile(LearnedPositionsFile, kw_only=True):
    """Keys of OPT. Of OPT 350M alone, do_layer_norm_before is false, and embeddings are narrower than the stream."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"_remove_final_layer_norm": (None, False)}
    dropouts: ClassVar[Mapping[str, float]] = {"dropout": 0.1, "attention_dropout": 0.0, "layerdrop": 0.0}
    vocab_size: Vocabulary = 50_272
    hidden_size: Width = 768
    ffn_dim: Width = 3072
    num_hidden_layers: Count = 12
    num_attention_heads: Count = 12
    activation_function: str = "relu"
    word_embed_proj_dim: Width | None = None
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True
    do_layer_norm_before: bool = True

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of OPT (arXiv 2205.01068)."""
        width, norms = self.word_embed_proj_dim, ("self_attn_layer_norm", "final_layer_norm")
        before, after = (norms, ("", "")) if self.do_layer_norm_before else (("", ""), norms)
        return {
            **super().variant(),
            "rms_norm_eps": 1e-5,
            "norm_weight": self.layer_norm_elementwise_affine,
            "norms_stream": not self.do_layer_norm_before,
            "embedding_width": 0 if width in (None, self.hidden_size) else width,
            "intermediate_size": self.ffn_dim,
            "position_table": "model.embed_positions",
            "position_offset": 2,
            "o_proj": "self_attn.out_proj",
            "up_proj": "fc1",
            "down_proj": "fc2",
            "attention_norm": before[0],
            "mlp_norm": before[1],
            "attention_out_norm": after[0],
            "mlp_out_norm": after[1],
            "qkv_bias": self.enable_bias,
            "o_bias": self.enable_bias,
            "mlp_bias": self.enable_bias,
            "final_norm": "model.final_layer_norm" if self.do_layer_norm_before else "",
            "file_names": (("model.", ("model.decoder.", "decoder.")),),
        }
