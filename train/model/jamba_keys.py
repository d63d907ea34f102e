"""Families with Mamba-1: the keys of their config.json, and their differences from Llama."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from wgrad.device.contract import MAX_SCAN_STATES
from wgrad.train.model.config_file import ConfigFile, Count, Epsilon, Factor, Positions, Vocabulary, Width
from wgrad.train.model.expert_keys import ChosenCount, ExpertCount, ExpertsFile
from wgrad.train.model.experts import Experts
from wgrad.train.model.mamba_sizes import Mamba1

_Taps = Annotated[int, Meta(ge=1, le=8)]
_Index = Annotated[int, Meta(ge=0, le=1 << 12)]


def _rank(given: int | str, hidden: int, key: str) -> int:
    """Return the elements of the time steps before their projection. "auto": a sixteenth of the width."""
    if isinstance(given, str) and given != "auto":
        raise ValueError(f'{key} must be a number or "auto"; got {given!r}')
    return math.ceil(hidden / 16) if isinstance(given, str) else given


def _check_mamba(c: Mamba1, state: str, act: str) -> None:
    """Raise ValueError if the activation or the number of states, the key `state`, is not supported."""
    if c.state_dim > MAX_SCAN_STATES:
        raise ValueError(f"{state} must be at most {MAX_SCAN_STATES}; got {c.state_dim}")
    if act not in ("silu", "swish"):
        raise ValueError(f"hidden_act must be silu, which Mamba's convolutions have; got {act!r}")


class JambaFile(ExpertsFile, kw_only=True):
    """Keys of Jamba. A layer has experts if there are several (num_experts) and its index fits expert_layer_*."""

    usual_experts: ClassVar[int] = 16
    count_keys: ClassVar[tuple[str, ...]] = ("num_local_experts", "num_experts")
    may_be_none: ClassVar[bool] = True
    some_have_experts: ClassVar[bool] = True
    vocab_size: Vocabulary = 65_536
    intermediate_size: Width = 14_336
    num_key_value_heads: Count = 8
    max_position_embeddings: Positions = 262_144
    num_experts: ExpertCount = 16
    num_experts_per_tok: ChosenCount = 2
    expert_layer_period: Count = 2
    expert_layer_offset: _Index = 1
    attn_layer_period: Count = 8
    attn_layer_offset: _Index = 4
    mamba_d_state: Width = 16
    mamba_d_conv: _Taps = 4
    mamba_expand: Count = 2
    mamba_dt_rank: Width | str = "auto"
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    use_mamba_kernels: Any = None  # ignored, as the next two: how transformers computes the same
    use_mambapy: Any = None
    use_associative_scan: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in ("expert", "attn"):
            offset, period = getattr(self, f"{kind}_layer_offset"), getattr(self, f"{kind}_layer_period")
            if offset >= period:
                raise ValueError(f"{kind}_layer_offset must be less than {kind}_layer_period, {period}; got {offset}")
        _check_mamba(self.mamba, "mamba_d_state", self.hidden_act)

    @property
    def experts(self) -> int:
        """Number of experts, 0 if every layer has an MLP."""
        count = super().experts
        return count if count > 1 else 0

    @property
    def mamba(self) -> Mamba1:
        period, offset = self.attn_layer_period, self.attn_layer_offset
        return Mamba1(
            layers=tuple(i % period != offset for i in range(self.num_hidden_layers)),
            inner=self.mamba_expand * self.hidden_size,
            rank=_rank(self.mamba_dt_rank, self.hidden_size, "mamba_dt_rank"),
            state_dim=self.mamba_d_state,
            width=self.mamba_d_conv,
            conv_bias=self.mamba_conv_bias,
            proj_bias=self.mamba_proj_bias,
        )

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of Jamba (arXiv 2403.19887), which has no rotary embeddings."""
        mamba, period, offset = self.mamba, self.expert_layer_period, self.expert_layer_offset
        layers = tuple(self.experts > 0 and i % period == offset for i in range(self.num_hidden_layers))
        experts = Experts(
            self.experts,
            self.num_experts_per_tok,
            self.intermediate_size,
            layers,
            normalize=False,
            module="feed_forward.experts",
            router="feed_forward.router",
            files="jamba",
            balance=self.balance,
        )
        return {
            "use_rope": (False,) * self.num_hidden_layers,
            "mlp_norm": "pre_ff_layernorm",
            "final_norm": "model.final_layernorm",
            "gate_proj": "feed_forward.gate_proj",
            "up_proj": "feed_forward.up_proj",
            "down_proj": "feed_forward.down_proj",
            "linear": mamba if any(mamba.layers) else None,
            "experts": experts if any(layers) else None,
        }


class MambaFile(ConfigFile, kw_only=True):
    """Keys of Mamba. No key limits the positions, so max_position_embeddings has the value that llama.cpp writes.

    intermediate_size: Elements of a token's x; a missing key means expand times the width.
    """

    vocab_size: Vocabulary = 50_280
    hidden_size: Width = 768
    max_position_embeddings: Positions = 1 << 20
    intermediate_size: Width | None = None  # type: ignore[assignment]
    num_attention_heads: Any = None  # ignored, as the next two: no layer has attention
    num_key_value_heads: Any = None
    head_dim: Any = None
    rms_norm_eps: Any = None  # ignored: layer_norm_epsilon replaces it
    tie_word_embeddings: bool = True
    layer_norm_epsilon: Epsilon = 1e-5
    state_size: Width = 16
    expand: Factor = 2
    conv_kernel: _Taps = 4
    time_step_rank: Width | str = "auto"
    use_bias: bool = False
    use_conv_bias: bool = True
    use_mambapy: Any = None  # ignored, as the next one: how transformers computes the same
    use_associative_scan: Any = None

    def __post_init__(self) -> None:
        _check_mamba(self.mamba(), "state_size", self.hidden_act)

    @property
    def attention_sizes(self) -> tuple[int, int, int]:
        """Sizes of attention: a dummy head of two elements, since no layer has attention."""
        return 1, 1, 2

    def mamba(self, **how: Any) -> Mamba1:
        """Return the sizes of Mamba. how: further fields of `Mamba1`."""
        return Mamba1(
            layers=(True,) * self.num_hidden_layers,
            inner=self.intermediate_size or int(self.expand * self.hidden_size),
            rank=_rank(self.time_step_rank, self.hidden_size, "time_step_rank"),
            state_dim=self.state_size,
            width=self.conv_kernel,
            module="mixer",
            conv_bias=self.use_conv_bias,
            proj_bias=self.use_bias,
            adapted=False,
            **({"norms_of_parts": False} | how),
        )

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of Mamba (arXiv 2312.00752): each layer has one norm and the operator."""
        return {
            "rms_norm_eps": self.layer_norm_epsilon,
            "intermediate_size": 0,
            "use_rope": (False,) * self.num_hidden_layers,
            "mlp_layers": (False,) * self.num_hidden_layers,
            "attention_norm": "norm",
            "final_norm": "model.norm_f",
            "linear": self.mamba(),
            "embedding": "model.embeddings",
            "file_names": (
                ("model.embed_tokens.", ("backbone.embeddings.", "backbone.embedding.")),
                ("model.", ("backbone.",)),
            ),
        }


class FalconMambaFile(MambaFile, kw_only=True):
    """Keys of FalconMamba, whose time steps, B and C are normed, without weights."""

    mixer_rms_eps: Epsilon = 1e-6
    use_falcon_mambapy: Any = None  # ignored: how transformers computes the same

    def variant(self) -> dict[str, Any]:
        normed = {"norms_of_parts": True, "norm_weights": False, "norm_eps": self.mixer_rms_eps}
        return {**super().variant(), "linear": self.mamba(**normed)}
