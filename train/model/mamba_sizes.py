"""Layers with Mamba-2: their sizes, and their tensors in the place of attention's."""

from __future__ import annotations

from dataclasses import dataclass, field

from wgrad.device.contract import DELTA_CHUNK

UNLIMITED = (0.0, float("inf"))


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """layers: those that have it. heads, head_dim: of x; groups, state_dim: of B and C. width: of the convolution, in
    tokens. module: path within the layer. conv_bias, in_bias, out_bias: of the convolution and the projections. limits:
    of the time steps. alongside: of attention, which the layer has as well. in_scale, out_scale, scales: of the input,
    of the output, and of z, x, B, C and dt. norm: the output is normed, in as many parts as there are groups;
    norm_first: before the gate, else behind it. adapted: PEFT adapts the output projection."""

    layers: tuple[bool, ...]
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    width: int
    module: str = field(default="mamba", repr=False)
    conv_bias: bool = field(default=True, repr=False)
    in_bias: bool = field(default=False, repr=False)
    out_bias: bool = field(default=False, repr=False)
    limits: tuple[float, float] = field(default=UNLIMITED, repr=False)
    alongside: bool = field(default=False, repr=False)
    in_scale: float = field(default=1.0, repr=False)
    out_scale: float = field(default=1.0, repr=False)
    scales: tuple[float, ...] = field(default=(1.0,) * 5, repr=False)
    norm: bool = field(default=True, repr=False)
    norm_first: bool = field(default=False, repr=False)

    adapted: bool = field(default=True, repr=False)

    norms = None

    @property
    def unadapted(self) -> tuple[str, ...]:
        """Return the projections that PEFT does not adapt."""
        return () if self.adapted else (self.out_proj,)

    @property
    def in_proj(self) -> str:
        return f"{self.module}.in_proj"

    @property
    def out_proj(self) -> str:
        return f"{self.module}.out_proj"

    @property
    def inner(self) -> int:
        """Numbers of a token's x, and of the layer's output before its projection."""
        return self.heads * self.head_dim

    @property
    def parts(self) -> tuple[int, int, int]:
        """Numbers of a token's x, B and C."""
        shared = self.groups * self.state_dim
        return self.inner, shared, shared

    @property
    def channels(self) -> int:
        """Numbers of a token that go through the convolution."""
        return sum(self.parts)

    @property
    def biased(self) -> dict[str, bool]:
        """Return which of the projections have a bias."""
        return {self.in_proj: self.in_bias, self.out_proj: self.out_bias}

    def flops(self, tokens: int) -> float:
        """As of `LinearAttention`."""
        inside = 2.0 * DELTA_CHUNK * (self.state_dim + self.head_dim)
        return tokens * self.heads * (inside + 4.0 * self.state_dim * self.head_dim)

    @property
    def kept(self) -> int:
        """As of `LinearAttention`."""
        return 3 * self.channels + 4 * self.inner

    @property
    def state(self) -> tuple[int, ...]:
        """As of `LinearAttention`."""
        return (self.heads, self.state_dim, self.head_dim)

    def projections(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Shape [out, in] of a layer's, by their path within the layer."""
        return {
            self.in_proj: (self.inner + self.channels + self.heads, hidden),
            self.out_proj: (hidden, self.inner),
        }

    @property
    def others(self) -> dict[str, tuple[int, ...]]:
        """As of `LinearAttention`."""
        found: dict[str, tuple[int, ...]] = {"conv1d.weight": (self.channels, 1, self.width)}
        found |= {"conv1d.bias": (self.channels,)} if self.conv_bias else {}
        found |= dict.fromkeys(("dt_bias", "A_log", "D"), (self.heads,))
        found |= {"norm.weight": (self.inner,)} if self.norm else {}
        return {f"{self.module}.{name}": shape for name, shape in found.items()}
