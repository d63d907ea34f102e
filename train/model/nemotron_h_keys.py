"""Nemotron-H and Nemotron 3: the keys of their config.json, and their differences from Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from wgrad.device.contract import MAX_KEY_DIM
from wgrad.train.model.config_file import AtLeast0, ConfigFile, Count, Epsilon, Positions, Vocabulary, Width
from wgrad.train.model.expert_keys import ChosenCount, ExpertCount
from wgrad.train.model.experts import Experts
from wgrad.train.model.mamba_sizes import MAMBA_LAYER, UNLIMITED, Mamba2
from wgrad.train.model.scored_keys import check_groups

_KINDS = {"M": MAMBA_LAYER, "*": "attention", "-": "mlp", "E": "moe"}
_SAME = {"linear_attention": MAMBA_LAYER, "full_attention": "attention"}


class NemotronHFile(ConfigFile, kw_only=True):
    """Keys of Nemotron-H and Nemotron 3.

    hybrid_override_pattern has a letter for the kind of each layer; layers_block_type and layer_types have names.
    num_hidden_layers is their length. num_local_experts replaces n_routed_experts, as in transformers.
    """

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mamba_hidden_act": ("silu", "swish"),
    }
    some_have_experts: ClassVar[bool] = True
    vocab_size: Vocabulary = 131_072
    intermediate_size: Width = 21_504
    num_hidden_layers: Count | None = None  # type: ignore[assignment]
    num_key_value_heads: Count = 8
    head_dim: Width = 128
    max_position_embeddings: Positions = 4096
    hidden_act: Any = None  # ignored: mlp_hidden_act replaces it
    attention_bias: bool = False  # ignored, as in transformers
    mlp_hidden_act: str = "relu2"
    mlp_bias: bool = False
    use_bias: bool = False
    rms_norm_eps: Any = None  # ignored: layer_norm_epsilon replaces it
    layer_norm_epsilon: Epsilon = 1e-5
    hybrid_override_pattern: str | None = None
    layers_block_type: list[str] | None = None
    layer_types: list[str] | None = None
    ssm_state_size: Width = 128
    mamba_num_heads: Count = 128
    mamba_head_dim: Width = 64
    n_groups: Count = 8
    conv_kernel: Annotated[int, Meta(ge=1, le=8)] = 4
    use_conv_bias: bool = True
    time_step_min: AtLeast0 = 0.001
    n_routed_experts: ExpertCount = 8
    num_local_experts: ExpertCount | None = None
    num_experts_per_tok: ChosenCount = 2
    moe_intermediate_size: Width = 7688
    moe_shared_expert_intermediate_size: Width = 7688
    moe_latent_size: Width | None = None
    n_group: Count = 1
    topk_group: Count = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: AtLeast0 = 1.0

    def __post_init__(self) -> None:
        self.num_hidden_layers = len(self.kinds)
        if self.num_local_experts is not None:
            self.n_routed_experts = self.num_local_experts
        if "moe" in self.kinds:
            check_groups(self.n_routed_experts, self.n_group, self.topk_group, self.num_experts_per_tok)
        if self.mamba_num_heads % self.n_groups:
            raise ValueError(f"mamba_num_heads must be a multiple of n_groups, {self.n_groups}")
        if self.ssm_state_size > MAX_KEY_DIM:
            raise ValueError(f"ssm_state_size must be at most {MAX_KEY_DIM}; got {self.ssm_state_size}")

    @property
    def kinds(self) -> list[str]:
        """Kind of each layer, one of _KINDS' values.

        Raises:
            ValueError: A kind is not supported, or there are no layers or too many.
        """
        given = self.layers_block_type or self.layer_types
        key, listed = "layers_block_type" if self.layers_block_type else "layer_types", given or []
        if given is None:
            key, listed = "hybrid_override_pattern", list(self.hybrid_override_pattern or "ME*-")
        found = [_KINDS.get(kind, _SAME.get(kind, kind)) for kind in listed]
        for kind, name in zip(listed, found):
            if name not in _KINDS.values():
                raise ValueError(f"{key} must be of Mamba (M), attention (*), MLPs (-) and experts (E); got {kind!r}")
        if not 0 < len(found) <= 4096:
            raise ValueError(f"{key} must name 1 to 4096 layers; got {len(found)}")
        return found

    def experts_of(self, layers: tuple[bool, ...]) -> Experts | None:
        """Return Nemotron 3's experts, with DeepSeek-V3's router and without gates; None if no layer has them.

        Nemotron 3 Super's and Ultra's experts work on latents.
        """
        if not any(layers):
            return None
        return Experts(
            self.n_routed_experts,
            self.num_experts_per_tok,
            self.moe_intermediate_size,
            layers,
            self.norm_topk_prob,
            module="mixer.experts",
            router="mixer.gate",
            files="nemotron",
            shared_width=self.moe_shared_expert_intermediate_size,
            shared="mixer.shared_experts",
            shared_gate="",
            sigmoid=True,
            correction="mixer.gate.e_score_correction_bias",
            groups=self.n_group,
            top_groups=self.topk_group,
            share_scale=self.routed_scaling_factor,
            gated=False,
            latent_width=self.moe_latent_size or 0,
            latent_projections=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
        )

    def variant(self) -> dict[str, Any]:
        """Return the `ModelConfig` fields of Nemotron-H (arXiv 2504.03624).

        Each layer has one of Mamba-2, attention, an MLP and experts. There are no rotary embeddings.
        """
        kinds = self.kinds
        mamba = Mamba2(
            layers=tuple(kind == MAMBA_LAYER for kind in kinds),
            heads=self.mamba_num_heads,
            head_dim=self.mamba_head_dim,
            groups=self.n_groups,
            state_dim=self.ssm_state_size,
            width=self.conv_kernel,
            module="mixer",
            conv_bias=self.use_conv_bias,
            in_bias=self.use_bias,
            out_bias=self.use_bias,
            limits=(self.time_step_min, UNLIMITED[1]),
            adapted=False,
        )
        widths = {"intermediate_size": self.moe_intermediate_size} if {"moe", "mlp"} & {*kinds} == {"moe"} else {}
        return {
            **widths,
            "hidden_act": self.mlp_hidden_act,
            "gated": False,
            "rms_norm_eps": self.layer_norm_epsilon,
            "use_rope": (False,) * len(kinds),
            "mlp_bias": self.mlp_bias,
            "attention_norm": "norm",
            "mlp_norm": "norm",
            "final_norm": "model.norm_f",
            "attention": "mixer",
            "o_proj": "mixer.o_proj",
            "up_proj": "mixer.up_proj",
            "down_proj": "mixer.down_proj",
            "mixing_layers": tuple(kind not in ("mlp", "moe") for kind in kinds),
            "mlp_layers": tuple(kind in ("mlp", "moe") for kind in kinds),
            "linear": mamba if any(mamba.layers) else None,
            "experts": self.experts_of(tuple(kind == "moe" for kind in kinds)),
            "embedding": "model.embeddings",
            "file_names": (
                ("model.embed_tokens.", ("backbone.embeddings.", "model.embeddings.")),
                ("model.", ("backbone.",)),
            ),
        }
