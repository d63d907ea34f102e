"""Layers with a recurrence or a convolution instead of attention: their sizes and tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from wgrad.device.contract import DELTA_CHUNK

# Projections of a layer's input to q, k, v, the gate z, b and a. They differ by family: "joined" has q, k and v in one
# projection, "by_head" has two projections ordered by key heads, and "apart" has one projection for each.
PROJECTIONS = {
    "joined": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "by_head": ("in_proj_qkvz", "in_proj_ba"),
    "apart": ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
}


@dataclass(frozen=True, kw_only=True)
class LinearAttention:
    """Sizes of gated linear attention (gated DeltaNet).

    Attributes:
        layers: Whether each layer has it.
        heads, key_heads: Number of value heads, and of key heads, which value heads share.
        key_dim, value_dim: Elements of a key head and of a value head.
        width: Width of the convolution in tokens.
        projected: Key of PROJECTIONS.
        beta_scale: Upper limit of beta.
        norm, norm_eps: Path and epsilon of the output's norm. An epsilon of 0 means the model's.
        norms: Norms of these layers, as `ModelConfig.norms_of` returns them, if they differ from other layers'.
        out_proj: Path of the output projection.
        files: Names in files, a key of `linear_files.LAYOUTS`.
    """

    layers: tuple[bool, ...]
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    width: int
    projected: str = field(default="joined", repr=False)
    beta_scale: float = field(default=1.0, repr=False)
    norm: str = field(default="linear_attn.norm", repr=False)
    norm_eps: float = field(default=0.0, repr=False)
    norms: tuple[str, str, str, str] | None = field(default=None, repr=False)
    out_proj: str = field(default="linear_attn.out_proj", repr=False)
    files: str = field(default="", repr=False)

    alongside = False
    in_scale = out_scale = 1.0
    unadapted = ()

    @property
    def biased(self) -> dict[str, bool]:
        """Paths of the projections, each with whether it has a bias, for those that do not follow the MLP."""
        return {}

    @property
    def value_size(self) -> int:
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Elements of a token in the convolution: q, k and v."""
        return sum(self.rows)

    @property
    def rows(self) -> tuple[int, int, int]:
        """Elements of a token's q, k and v."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_size

    def flops(self, tokens: int) -> float:
        """Return the forward FLOP of a layer's chunked delta rule."""
        inside = 2.0 * DELTA_CHUNK * (2 * self.key_dim + 2 * self.value_dim)
        return tokens * self.heads * (inside + 6.0 * self.key_dim * self.value_dim)

    @property
    def kept(self) -> int:
        """Estimated elements of a token that a layer keeps for its backward."""
        return 2 * self.channels + 4 * self.value_size

    @property
    def state(self) -> tuple[int, ...]:
        """Shape of a sequence's recurrent state."""
        return (self.heads, self.key_dim, self.value_dim)

    def projections(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return the shapes [out, in] of a layer's projections by path within the layer."""
        (keys, _, values), heads = self.rows, self.heads
        sizes = {
            "joined": (self.channels, values, heads, heads),
            "by_head": (self.channels + values, 2 * heads),
            "apart": (keys, keys, values, values, heads, heads),
        }[self.projected]
        shapes = {f"linear_attn.{name}": (out, hidden) for name, out in zip(PROJECTIONS[self.projected], sizes)}
        return shapes | {self.out_proj: (hidden, self.value_size)}

    @property
    def others(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a layer's other tensors, all float32, by path within the layer."""
        return {
            "linear_attn.conv1d.weight": (self.channels, 1, self.width),
            "linear_attn.dt_bias": (self.heads,),
            "linear_attn.A_log": (self.heads,),
            f"{self.norm}.weight": (self.value_dim,),
        }


@dataclass(frozen=True, kw_only=True)
class GatedConvolution:
    """Sizes of a gated short convolution.

    Attributes:
        layers: Whether each layer has it.
        channels: Elements of a token.
        width: Width of the convolution in tokens.
    """

    layers: tuple[bool, ...]
    channels: int
    width: int

    out_proj = "conv.out_proj"
    state = ()
    norms = None
    alongside = False
    unadapted = ()
    in_scale = out_scale = 1.0
    biased: ClassVar[dict[str, bool]] = {}

    def flops(self, tokens: int) -> float:
        """Return the forward FLOP of a layer's convolution."""
        return 2.0 * tokens * self.channels * self.width

    @property
    def kept(self) -> int:
        """Estimated elements of a token that a layer keeps for its backward."""
        return 6 * self.channels

    def projections(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return the shapes [out, in] of a layer's projections by path within the layer."""
        return {"conv.in_proj": (3 * self.channels, hidden), self.out_proj: (hidden, self.channels)}

    @property
    def others(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a layer's other tensors, all float32, by path within the layer."""
        return {"conv.conv.weight": (self.channels, 1, self.width)}
