"""Layers with a recurrence or a convolution: their sizes, and their tensors in the place of attention's."""

from __future__ import annotations

from dataclasses import dataclass

from wgrad.device.contract import DELTA_CHUNK


@dataclass(frozen=True, kw_only=True)
class LinearAttention:
    """layers: those that have it. heads: of values, which share key_heads; key_dim, value_dim: their widths. width: of
    the convolution, in tokens."""

    layers: tuple[bool, ...]
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def value_size(self) -> int:
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Numbers of a token that go through the convolution: q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_size

    out_proj = "linear_attn.out_proj"

    def flops(self, tokens: int) -> float:
        """FLOP of a layer's delta rule in chunks, forward."""
        inside = 2.0 * DELTA_CHUNK * (2 * self.key_dim + 2 * self.value_dim)
        return tokens * self.heads * (inside + 6.0 * self.key_dim * self.value_dim)

    @property
    def kept(self) -> int:
        """Numbers of a token that a layer keeps for its backward, roughly."""
        return 2 * self.channels + 4 * self.value_size

    @property
    def state(self) -> tuple[int, ...]:
        """Shape of what a sequence keeps of all tokens so far."""
        return (self.heads, self.key_dim, self.value_dim)

    def projections(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Shape [out, in] of a layer's, by their path within the layer."""
        parts = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        first = dict(zip(parts, (self.channels, self.value_size, self.heads, self.heads)))
        shapes = {f"linear_attn.{name}": (out, hidden) for name, out in first.items()}
        return shapes | {self.out_proj: (hidden, self.value_size)}

    @property
    def others(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a layer's other tensors, all float32, by their path within the layer."""
        return {
            "linear_attn.conv1d.weight": (self.channels, 1, self.width),
            "linear_attn.dt_bias": (self.heads,),
            "linear_attn.A_log": (self.heads,),
            "linear_attn.norm.weight": (self.value_dim,),
        }


@dataclass(frozen=True, kw_only=True)
class GatedConvolution:
    """layers: those that have it. channels: numbers of a token. width: of the convolution, in tokens."""

    layers: tuple[bool, ...]
    channels: int
    width: int

    out_proj = "conv.out_proj"
    state = ()

    def flops(self, tokens: int) -> float:
        """As of `LinearAttention`."""
        return 2.0 * tokens * self.channels * self.width

    @property
    def kept(self) -> int:
        """As of `LinearAttention`."""
        return 6 * self.channels

    def projections(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Shape [out, in] of a layer's, by their path within the layer."""
        return {"conv.in_proj": (3 * self.channels, hidden), self.out_proj: (hidden, self.channels)}

    @property
    def others(self) -> dict[str, tuple[int, ...]]:
        """As of `LinearAttention`."""
        return {"conv.conv.weight": (self.channels, 1, self.width)}
