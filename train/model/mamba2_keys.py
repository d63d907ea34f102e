"""Mamba-2 without attention: the keys of its config.json, and its differences from Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from wgrad.train.model.config_file import ConfigFile, Count, Epsilon, Factor, Positions, Vocabulary, Width
from wgrad.train.model.mamba_keys import check_mamba, time_step_limits
from wgrad.train.model.mamba_sizes import Mamba2


class Mamba2File(ConfigFile, kw_only=True):
    """Keys of Mamba-2.

    num_heads and head_dim are those of Mamba-2's heads. No key limits the positions, so max_position_embeddings has the
    value that llama.cpp writes.
    """

    vocab_size: Vocabulary = 32_768
    hidden_size: Width = 4096
    num_hidden_layers: Count = 64
    max_position_embeddings: Positions = 1 << 20
    intermediate_size: Any = None  # ignored, as the next two: no layer has an MLP or attention
    num_attention_heads: Any = None
    num_key_value_heads: Any = None
    rms_norm_eps: Any = None  # ignored: layer_norm_epsilon replaces it
    layer_norm_epsilon: Epsilon = 1e-5
    num_heads: Count = 128
    head_dim: Width = 64
    n_groups: Count = 8
    state_size: Width = 128
    expand: Factor = 2
    conv_kernel: Annotated[int, Meta(ge=1, le=8)] = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    time_step_limit: list[Any] | None = None

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **dict.fromkeys(("d_intermediate", "attn_layer_idx"), (None, 0, [])),  # other layers of mamba_ssm's models
    }

    def __post_init__(self) -> None:
        inner = int(self.expand * self.hidden_size)
        keys = ("num_heads", "head_dim", "n_groups", "state_size", "expand times hidden_size")
        check_mamba(self.mamba, inner, self.hidden_act, *keys)

    @property
    def attention_sizes(self) -> tuple[int, int, int]:
        """Sizes of attention: a dummy head of two elements, since no layer has attention."""
        return 1, 1, 2

    @property
    def mamba(self) -> Mamba2:
        return Mamba2(
            layers=(True,) * self.num_hidden_layers,
            heads=self.num_heads,
            head_dim=self.head_dim,
            groups=self.n_groups,
            state_dim=self.state_size,
            width=self.conv_kernel,
            module="mixer",
            conv_bias=self.use_conv_bias,
            in_bias=self.use_bias,
            out_bias=self.use_bias,
            limits=time_step_limits(self.time_step_limit),
            adapted=False,
        )

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of Mamba-2 (arXiv 2405.21060): each layer has one norm and the operator."""
        return {
            "hidden_act": "silu",
            "rms_norm_eps": self.layer_norm_epsilon,
            "intermediate_size": 0,
            "use_rope": (False,) * self.num_hidden_layers,
            "mlp_layers": (False,) * self.num_hidden_layers,
            "attention_norm": "norm",
            "final_norm": "model.norm_f",
            "linear": self.mamba,
            "embedding": "model.embeddings",
            "file_names": (
                ("model.embed_tokens.", ("backbone.embeddings.", "backbone.embedding.")),
                ("model.", ("backbone.",)),
            ),
        }
