"""Layers with Mamba-1 or Mamba-2: their sizes and tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from wgrad.device.contract import DELTA_CHUNK, SCAN_CHUNK

UNLIMITED = (0.0, float("inf"))
MAMBA_LAYER = "mamba"  # the kind of a layer in config.json


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """Sizes and variants of Mamba-2.

    Attributes:
        layers: Whether each layer has it.
        heads, head_dim: Number and size of heads of x.
        groups, state_dim: Number and size of heads of B and C.
        width: Width of the convolution in tokens.
        module: Path within the layer.
        conv_bias, in_bias, out_bias: Whether the convolution and the projections have biases.
        limits: Lowest and highest time step.
        alongside: Whether the layer has attention as well.
        in_scale, out_scale: Factors of the input and the output.
        scales: Factors of z, x, B, C and dt.
        norm: Whether the output is normed, each group by itself.
        norm_first: Whether the norm comes before the gate.
        adapted: Whether PEFT adapts the output projection.
    """

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
        """Paths of the projections that PEFT does not adapt."""
        return () if self.adapted else (self.out_proj,)

    @property
    def in_proj(self) -> str:
        return f"{self.module}.in_proj"

    @property
    def out_proj(self) -> str:
        return f"{self.module}.out_proj"

    @property
    def inner(self) -> int:
        """Elements of a token's x, and of the result before the output projection."""
        return self.heads * self.head_dim

    @property
    def parts(self) -> tuple[int, int, int]:
        """Elements of a token's x, B and C."""
        shared = self.groups * self.state_dim
        return self.inner, shared, shared

    @property
    def channels(self) -> int:
        """Elements of a token in the convolution."""
        return sum(self.parts)

    @property
    def biased(self) -> dict[str, bool]:
        """Paths of the projections, each with whether it has a bias."""
        return {self.in_proj: self.in_bias, self.out_proj: self.out_bias}

    def flops(self, tokens: int) -> float:
        """Return the forward FLOP of a layer's chunked recurrence."""
        inside = 2.0 * DELTA_CHUNK * (self.state_dim + self.head_dim)
        return tokens * self.heads * (inside + 4.0 * self.state_dim * self.head_dim)

    @property
    def kept(self) -> int:
        """Estimated elements of a token that a layer keeps for its backward."""
        return 3 * self.channels + 4 * self.inner

    @property
    def state(self) -> tuple[int, ...]:
        """Shape of a sequence's recurrent state."""
        return (self.heads, self.state_dim, self.head_dim)

    def projections(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return the shapes [out, in] of a layer's projections by path within the layer."""
        return {
            self.in_proj: (self.inner + self.channels + self.heads, hidden),
            self.out_proj: (hidden, self.inner),
        }

    @property
    def others(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a layer's other tensors, all float32, by path within the layer."""
        found: dict[str, tuple[int, ...]] = {"conv1d.weight": (self.channels, 1, self.width)}
        found |= {"conv1d.bias": (self.channels,)} if self.conv_bias else {}
        found |= dict.fromkeys(("dt_bias", "A_log", "D"), (self.heads,))
        found |= {"norm.weight": (self.inner,)} if self.norm else {}
        return {f"{self.module}.{name}": shape for name, shape in found.items()}


@dataclass(frozen=True, kw_only=True)
class Mamba1:
    """Sizes and variants of Mamba-1.

    Attributes:
        layers: Whether each layer has it.
        inner: Elements of a token's x, and of the result before the output projection.
        rank: Elements of the time steps before their projection.
        state_dim: States of each element of x.
        width: Width of the convolution in tokens.
        module: Path within the layer.
        conv_bias, proj_bias: Whether the convolution and the outer projections have biases.
        norms_of_parts: Whether time steps, B and C are normed.
        norm_weights: Whether these norms have weights.
        norm_eps: Their epsilon; 0: the model's.
        adapted: Whether PEFT adapts the output projection.
    """

    layers: tuple[bool, ...]
    inner: int
    rank: int
    state_dim: int
    width: int
    module: str = field(default="mamba", repr=False)
    conv_bias: bool = field(default=True, repr=False)
    proj_bias: bool = field(default=False, repr=False)
    norms_of_parts: bool = field(default=True, repr=False)
    norm_weights: bool = field(default=True, repr=False)
    norm_eps: float = field(default=0.0, repr=False)
    adapted: bool = field(default=True, repr=False)

    norms = None
    alongside = False
    in_scale = out_scale = 1.0

    @property
    def unadapted(self) -> tuple[str, ...]:
        """Paths of the projections that PEFT does not adapt, or whose weights transformers reads itself."""
        return (self.dt_proj,) if self.adapted else (self.dt_proj, self.out_proj)

    @property
    def in_proj(self) -> str:
        return f"{self.module}.in_proj"

    @property
    def x_proj(self) -> str:
        return f"{self.module}.x_proj"

    @property
    def dt_proj(self) -> str:
        return f"{self.module}.dt_proj"

    @property
    def out_proj(self) -> str:
        return f"{self.module}.out_proj"

    @property
    def channels(self) -> int:
        """Elements of a token in the convolution."""
        return self.inner

    @property
    def biased(self) -> dict[str, bool]:
        """Paths of the projections, each with whether it has a bias."""
        outer = dict.fromkeys((self.in_proj, self.out_proj), self.proj_bias)
        return {**outer, self.x_proj: False, self.dt_proj: True}

    def flops(self, tokens: int) -> float:
        """Return the forward FLOP of a layer's recurrence."""
        return 8.0 * tokens * self.inner * self.state_dim

    @property
    def kept(self) -> int:
        """Estimated elements of a token that a layer keeps for its backward."""
        return 6 * self.inner + 2 * self.inner * self.state_dim // SCAN_CHUNK

    @property
    def state(self) -> tuple[int, ...]:
        """Shape of a sequence's recurrent state."""
        return (self.inner, self.state_dim)

    def projections(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return the shapes [out, in] of a layer's projections by path within the layer."""
        return {
            self.in_proj: (2 * self.inner, hidden),
            self.x_proj: (self.rank + 2 * self.state_dim, self.inner),
            self.dt_proj: (self.inner, self.rank),
            self.out_proj: (hidden, self.inner),
        }

    @property
    def others(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a layer's other tensors, all float32, by path within the layer."""
        found: dict[str, tuple[int, ...]] = {"conv1d.weight": (self.inner, 1, self.width)}
        found |= {"conv1d.bias": (self.inner,)} if self.conv_bias else {}
        found |= {"A_log": (self.inner, self.state_dim), "D": (self.inner,)}
        if self.norms_of_parts and self.norm_weights:
            sizes = {"dt": self.rank, "b": self.state_dim, "c": self.state_dim}
            found |= {f"{part}_layernorm.weight": (size,) for part, size in sizes.items()}
        return {f"{self.module}.{name}": shape for name, shape in found.items()}
