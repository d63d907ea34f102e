"""Families with Mamba-2: the keys of their config.json, and their differences from Llama."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from wgrad.device.contract import MAX_KEY_DIM
from wgrad.train.model.config_file import (
    AtLeast0,
    ConfigFile,
    Count,
    Epsilon,
    Factor,
    Positions,
    Vocabulary,
    Width,
    check_layers,
)
from wgrad.train.model.experts import Experts
from wgrad.train.model.mamba_sizes import MAMBA_LAYER, UNLIMITED, Mamba2
from wgrad.train.model.variants import biases

# Transformers 4's and 5's names of kinds of layers.
_ATTENTION, _MAMBA = ("attention", "full_attention"), (MAMBA_LAYER, "linear_attention")
_NAMES = {  # of Bamba's and Falcon H1's modules
    "mlp_norm": "pre_ff_layernorm",
    "final_norm": "model.final_layernorm",
    "gate_proj": "feed_forward.gate_proj",
    "up_proj": "feed_forward.up_proj",
    "down_proj": "feed_forward.down_proj",
}


def time_step_limits(given: Any) -> tuple[float, float]:
    """Return the lowest and highest time step. transformers 5 writes infinity as an object.

    Raises:
        ValueError: `given` is not a pair of ordered numbers.
    """
    if given is None:
        return UNLIMITED
    found = [float(x.get("__float__", "")) if isinstance(x, dict) else x for x in given]
    numbers = all(isinstance(x, int | float) and (x in UNLIMITED or x < sys.float_info.max) for x in found)
    if len(found) != 2 or not numbers or not 0 <= found[0] <= found[1]:
        raise ValueError(f"time_step_limit must be two numbers from 0 on, the lower one first; got {given!r}")
    return float(found[0]), float(found[1])


def check_mamba(
    c: Mamba2, inner: int, act: str, heads: str, width: str, groups: str, state: str, whole: str = ""
) -> None:
    """Check the sizes and the activation of Mamba-2.

    Args:
        inner: Elements of a token's x, as other keys give it.
        heads, width, groups, state: Keys of config.json of the sizes, for errors.
        whole: Keys from which `inner` is computed, for errors.

    Raises:
        ValueError: Sizes do not fit each other, or a size or the activation is not supported.
    """
    if c.head_dim < 1 or c.inner != inner:
        product = f"{heads} times {width}{f' and {whole}' if whole else ''}"
        raise ValueError(f"{product} must be {inner}; got {c.heads} and {c.head_dim}")
    if c.heads % c.groups:
        raise ValueError(
            f"{heads} and {groups}: the first must be a multiple of the second; got {c.heads} and {c.groups}"
        )
    if c.state_dim > MAX_KEY_DIM:
        raise ValueError(f"{state} must be at most {MAX_KEY_DIM}; got {c.state_dim}")
    if act not in ("silu", "swish"):
        raise ValueError(f"hidden_act must be silu, which Mamba-2's convolutions have; got {act!r}")


class MambaFile(ConfigFile, kw_only=True):
    """Keys common to families with Mamba-2, which are null in some models without it.

    mamba_d_head: "auto" means the width divided by the heads.
    """

    mamba_n_heads: Count | None = 128
    mamba_n_groups: Count | None = 1
    mamba_d_state: Width | None = 256
    mamba_d_head: Width | str | None = "auto"
    mamba_d_conv: Annotated[int, Meta(ge=1, le=8)] | None = 4
    mamba_expand: Factor | None = 2
    mamba_conv_bias: bool | None = True
    mamba_proj_bias: bool | None = False
    time_step_limit: list[Any] | None = None

    @property
    def mamba_width(self) -> int:
        """Elements of a token's x."""
        return int(self._given("mamba_expand") * self.hidden_size)

    def _given(self, key: str) -> Any:
        """Return a key's number. Raise ValueError if it is null."""
        value = getattr(self, key)
        if value is None:
            raise ValueError(f"{key} must be a number in models with Mamba-2; got null")
        return value

    def mamba(self, layers: tuple[bool, ...], **how: Any) -> Mamba2 | None:
        """Return the sizes of Mamba-2, or None if no layer has it.

        Args:
            layers: Whether each layer has it.
            how: Further fields of `Mamba2`.

        Raises:
            ValueError: Sizes do not fit each other.
        """
        if not any(layers):
            return None
        heads, inner, biased = self._given("mamba_n_heads"), self.mamba_width, bool(self.mamba_proj_bias)
        if isinstance(self.mamba_d_head, str) and self.mamba_d_head != "auto":
            raise ValueError(f'mamba_d_head must be a number or "auto"; got {self.mamba_d_head!r}')
        found = Mamba2(
            layers=layers,
            heads=heads,
            head_dim=self.mamba_d_head if isinstance(self.mamba_d_head, int) else inner // heads,
            groups=self._given("mamba_n_groups"),
            state_dim=self._given("mamba_d_state"),
            width=self._given("mamba_d_conv"),
            conv_bias=bool(self.mamba_conv_bias),
            in_bias=biased,
            limits=time_step_limits(self.time_step_limit),
            **({"out_bias": biased} | how),
        )
        check_mamba(found, inner, self.hidden_act, "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state")
        return found


class GraniteHybridFile(MambaFile, kw_only=True):
    """Keys of Granite 4's models, with or without Mamba layers and experts."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"position_embedding_type": (None, "rope", "nope")}
    some_have_experts: ClassVar[bool] = True
    attention_bias: bool = False
    embedding_multiplier: Factor | None = 1.0
    attention_multiplier: Factor | None = 1.0
    residual_multiplier: Factor | None = 1.0
    logits_scaling: Factor | None = 1.0
    shared_intermediate_size: Width = 1024
    position_embedding_type: str | None = None
    num_local_experts: Annotated[int, Meta(ge=0, le=1024)] | None = 8
    num_experts_per_tok: Annotated[int, Meta(ge=0, le=64)] | None = 2
    output_router_logits: bool | None = False
    router_aux_loss_coef: AtLeast0 | None = 0.001
    layer_types: list[str] | None = None
    layers_block_type: list[str] | None = None

    def __post_init__(self) -> None:
        for key in ("layer_types", "layers_block_type"):
            check_layers(key, getattr(self, key), self.num_hidden_layers)
            for kind in getattr(self, key) or ():
                if kind not in _ATTENTION + _MAMBA:
                    raise ValueError(f"{key} must be {' or '.join(_ATTENTION + _MAMBA)}; got {kind!r}")
        if self.num_local_experts and not 0 < (self.num_experts_per_tok or 0) <= self.num_local_experts:
            raise ValueError(
                f"num_experts_per_tok must be at most the number of experts, {self.num_local_experts}; got "
                f"{self.num_experts_per_tok}"
            )
        self.mamba(self.mamba_layers)

    @property
    def mamba_layers(self) -> tuple[bool, ...]:
        """Return for each layer whether it has Mamba-2, which is the default."""
        kinds = self.layers_block_type or self.layer_types or (_MAMBA[0],) * self.num_hidden_layers
        return tuple(kind in _MAMBA for kind in kinds)

    @property
    def balance(self) -> float:
        return self.router_aux_loss_coef or 0.0 if self.output_router_logits else 0.0

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of Granite 4.

        Gate and up are one projection. Without experts this is the MLP; with experts it is the shared expert.
        """
        found = {
            **biases(self),
            "embedding_scale": self.embedding_multiplier or 1.0,
            "score_scale": self.attention_multiplier or 1.0,
            "residual_scale": self.residual_multiplier or 1.0,
            "logit_scale": 1 / (self.logits_scaling or 1.0),
            "use_rope": (self.position_embedding_type == "rope",) * self.num_hidden_layers,
            "linear": self.mamba(self.mamba_layers),
        }
        if self.num_local_experts:
            experts = Experts(
                self.num_local_experts,
                self.num_experts_per_tok or 1,
                self.intermediate_size,
                (True,) * self.num_hidden_layers,
                module="block_sparse_moe.experts",
                router="block_sparse_moe.router",
                files="granite",
                shared_width=self.shared_intermediate_size,
                shared="shared_mlp",
                shared_gate="",
                shared_fused=True,
            )
            return found | {"experts": experts}
        return found | {
            "intermediate_size": self.shared_intermediate_size,
            "gate_up_proj": "shared_mlp.input_linear",
            "down_proj": "shared_mlp.output_linear",
        }


class BambaFile(MambaFile, kw_only=True):
    """Keys of Bamba. attn_layer_indices: the layers with attention.

    Half of each head is rotated, whatever the file says, as in transformers.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"z_loss_coefficient": (None, 0)}
    partial_rotary: ClassVar[bool] = True
    vocab_size: Vocabulary = 128_000
    intermediate_size: Width = 14_336
    num_key_value_heads: Count | None = 8
    max_position_embeddings: Positions = 262_144
    rms_norm_eps: Epsilon = 1e-5
    partial_rotary_factor: AtLeast0 | None = 0.5
    attention_bias: bool = False
    mlp_bias: bool = False
    attn_layer_indices: list[int] | None = None

    def __post_init__(self) -> None:
        self.partial_rotary_factor = 0.5
        self.mamba(self.mamba_layers)

    @property
    def mamba_layers(self) -> tuple[bool, ...]:
        return tuple(i not in (self.attn_layer_indices or ()) for i in range(self.num_hidden_layers))

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of Bamba: Llama's layers, most of which have Mamba-2 instead of attention."""
        return {
            **biases(self),
            "mlp_bias": self.mlp_bias,
            **_NAMES,
            "linear": self.mamba(self.mamba_layers),
        }


class FalconH1File(MambaFile, kw_only=True):
    """Keys of Falcon-H1. mamba_d_ssm: elements of a token's x; if null, mamba_expand gives them."""

    default_theta: ClassVar[float] = 10_000.0
    vocab_size: Vocabulary = 128_000
    intermediate_size: Width = 14_336
    num_key_value_heads: Count | None = 8
    max_position_embeddings: Positions = 8192
    rms_norm_eps: Epsilon = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    projectors_bias: bool | None = False
    mamba_d_ssm: Width | None = 1024
    mamba_rms_norm: bool | None = False
    mamba_norm_before_gate: bool | None = True
    embedding_multiplier: Factor = 1.0
    lm_head_multiplier: Factor = 1.0
    key_multiplier: Factor = 1.0
    attention_in_multiplier: Factor = 1.0
    attention_out_multiplier: Factor = 1.0
    ssm_in_multiplier: Factor = 1.0
    ssm_out_multiplier: Factor = 1.0
    mlp_multipliers: Annotated[list[Factor], Meta(min_length=2, max_length=2)] | None = None
    ssm_multipliers: Annotated[list[Factor], Meta(min_length=5, max_length=5)] | None = None

    def __post_init__(self) -> None:
        self.mamba_of_all()

    @property
    def mamba_width(self) -> int:
        return super().mamba_width if self.mamba_d_ssm is None else self.mamba_d_ssm

    def mamba_of_all(self) -> Mamba2 | None:
        """Return the sizes of Mamba-2, which every layer has alongside attention."""
        return self.mamba(
            (True,) * self.num_hidden_layers,
            alongside=True,
            adapted=False,
            out_bias=bool(self.projectors_bias),
            norm=bool(self.mamba_rms_norm),
            norm_first=bool(self.mamba_norm_before_gate),
            in_scale=self.ssm_in_multiplier,
            out_scale=self.ssm_out_multiplier,
            scales=tuple(self.ssm_multipliers or (1.0,) * 5),
        )

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of Falcon-H1 (arXiv 2507.22448).

        Attention and Mamba-2 run in parallel, and each part has a multiplier.
        """
        gate, down = self.mlp_multipliers or (1.0, 1.0)
        width = max(self.attention_sizes[2], 1)  # 0 is refused by `check_heads`
        return {
            **biases(self),
            "mlp_bias": self.mlp_bias,
            **_NAMES,
            "embedding_scale": self.embedding_multiplier,
            "logit_scale": self.lm_head_multiplier,
            # Scaling the scores is the same as scaling the keys.
            "score_scale": self.key_multiplier * width**-0.5,
            "attention_in_scale": self.attention_in_multiplier,
            "attention_out_scale": self.attention_out_multiplier,
            "gate_scale": gate,
            "down_scale": down,
            "linear": self.mamba_of_all(),
        }
