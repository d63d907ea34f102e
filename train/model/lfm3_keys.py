"""LFM3: the keys of its config.json, and its differences from Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import UNSET, Meta, UnsetType

from wgrad.train.model.config_file import (
    ConfigFile,
    Count,
    Epsilon,
    Positions,
    RopeFile,
    Vocabulary,
    Width,
    check_layers,
)
from wgrad.train.model.linear_attention import GatedConvolution
from wgrad.train.model.variants import biases, layer_names

_KINDS = ("conv", "sliding_attention", "full_attention")


class Lfm3File(ConfigFile, kw_only=True):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"conv_bias": (None, False)}
    default_theta: ClassVar[float] = 1_000_000.0
    default_rope: ClassVar[RopeFile] = RopeFile(
        full_attention=RopeFile(rope_type="proportional", partial_rotary_factor=0.5, rope_theta=1_000_000.0),
        sliding_attention=RopeFile(rope_type="default", rope_theta=10_000.0),
    )
    vocab_size: Vocabulary = 128_000
    hidden_size: Width = 2048
    intermediate_size: Width = 7680
    num_hidden_layers: Count = 24
    num_attention_heads: Count = 16
    num_key_value_heads: Count = 4
    head_dim: Width = 128
    max_position_embeddings: Positions = 128_000
    hidden_act: Any = None  # ignored: it is the same in every model
    rms_norm_eps: Epsilon | UnsetType = UNSET  # type: ignore[assignment]
    norm_eps: Epsilon = 1e-5
    tie_word_embeddings: bool = True
    conv_L_cache: Annotated[int, Meta(ge=1, le=8)] = 7
    sliding_window: Positions | None = 256
    layer_types: list[str] | None = None
    use_sandwich_norm: bool = True
    use_attention_gate: bool = True
    attention_bias: bool = False

    def __post_init__(self) -> None:
        check_layers("layer_types", self.layer_types, self.num_hidden_layers)
        for kind in self.kinds:
            if kind not in _KINDS:
                raise ValueError(f"layer_types must be {', '.join(_KINDS[:2])} or {_KINDS[2]}; got {kind!r}")
        if self.sliding_window is None and "sliding_attention" in self.kinds:
            raise ValueError("sliding_window must be a number where layer_types has sliding_attention; got none")

    @property
    def kinds(self) -> list[str]:
        """Kind of each layer, one of _KINDS."""
        if self.layer_types is not None:
            return self.layer_types
        of_four = ("sliding_attention", "conv", "full_attention", "conv")
        return ["conv", *(of_four[i % 4] for i in range(1, self.num_hidden_layers))]

    @property
    def local_theta(self) -> float:
        return 10_000.0

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of LFM3: LFM2 with windows, norms of outputs, and gated heads."""
        kinds = self.kinds
        conv_layers = tuple(kind == "conv" for kind in kinds)
        convolution = GatedConvolution(layers=conv_layers, channels=self.hidden_size, width=self.conv_L_cache)
        outputs = {"attention_out_norm": "post_operator_norm", "mlp_out_norm": "post_ffn_norm"}
        gated = {
            "attention_gate_proj": "self_attn.g_proj",
            "gate_of_heads": True,
            "file_names": layer_names(self.num_hidden_layers, {"self_attn.g_proj.": "self_attn.gate_proj."}),
        }
        return {
            **biases(self),
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps if isinstance(self.rms_norm_eps, UnsetType) else self.rms_norm_eps,
            "qk_norm": True,
            "attention_norm": "operator_norm",
            "mlp_norm": "ffn_norm",
            "final_norm": "model.embedding_norm",
            **(outputs if self.use_sandwich_norm else {}),
            "gate_proj": "feed_forward.w1",
            "up_proj": "feed_forward.w3",
            "down_proj": "feed_forward.w2",
            "windows": tuple((self.sliding_window or 0) if kind == _KINDS[1] else 0 for kind in kinds),
            **(gated if self.use_attention_gate else {}),
            "linear": convolution if any(conv_layers) else None,
        }
