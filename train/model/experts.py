"""Mixture of experts: its sizes in a model, its weights' names, and what a layer computes.

The experts of a layer have two weights: gate and up (or up alone), and down. Names are those of transformers 5.
Sources: Mixtral (arXiv 2401.04088), OLMoE (arXiv 2409.02060), Qwen3 (arXiv 2505.09388), gpt-oss (arXiv 2508.10925).
"""

from __future__ import annotations

from dataclasses import dataclass, field

GATE_UP, UP, DOWN = "gate_up_proj", "up_proj", "down_proj"
EXPERTS = ".experts"  # end of the path of the module that holds both


@dataclass(frozen=True)
class Experts:
    """Sizes, paths and arithmetic of the experts of a model. A token's share of an expert is its routing weight.

    Attributes:
        count: Experts of a layer.
        chosen: Experts of a token.
        width: Intermediate width of an expert.
        layers: Whether each layer has experts.
        normalize: Whether the shares of a token add up to 1.
        module, router: Paths within a layer.
        files: Names in files, a key of `expert_files.LAYOUTS`.
        shared_width: Width of the shared expert, which every token uses; 0: none.
        shared, shared_gate: Paths of the shared expert and of the gate that weights its output; "": no gate.
        shared_fused: Whether gate and up of the shared expert are one projection.
        biased: Whether experts and router have biases.
        interleaved: Whether the rows of gate and up alternate. If so, the activation is `clamped_swiglu`.
        alpha, limit: Constants of `clamped_swiglu`.
        balance: Weight of the load-balancing loss in training.
        sigmoid: Whether the router's scores are sigmoids instead of a softmax.
        correction: Path of the numbers that are added to scores to choose experts; "": none.
        may_be_uncorrected: Whether files may leave these numbers out, which are 0 then.
        correction_rows: Whether `correction` has shape [1, count].
        corrects_logits: Whether it is added to logits instead.
        normalize_eps: Added to the sum by which the chosen sigmoids are divided.
        mixer: None: no SparseMixer. Otherwise the two best experts' shares follow it: each is a softmax over the
            remaining experts whose logits are within this fraction of its own.
        scales_input: Whether a token's share scales the input of its only expert instead of the output.
        adapted: Whether experts may have adapters.
        groups, top_groups: Groups of consecutive experts, and how many of them a token chooses from.
        groups_by_best: Whether groups are ranked by their best expert instead of their best two.
        share_scale: Factor of all shares.
        shared_scale: Factor of the shared expert's output.
        norms: Paths of norms in layers that add an MLP's output to the experts': of the MLP's output, before the
            experts, and of their output. The router then normalizes its input and divides its logits by sqrt(hidden).
        router_scale: Path of the weight [hidden] of the router's norm.
        share_scales: Path of a factor of each expert's share; "": none.
        gated: Whether experts multiply up by the activation of gate; else they have no gate.
        latent_width: Width of the latents that experts read and write instead of the stream; 0: none.
        latent_projections: Paths of the projections from the stream to latents, and back.
    """

    count: int
    chosen: int
    width: int
    layers: tuple[bool, ...]
    normalize: bool = True
    module: str = "mlp.experts"
    router: str = "mlp.gate"
    files: str = "llama"
    shared_width: int = 0
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"
    # Not part of `repr`, by which checkpoints identify a model: see `ModelConfig.identity`.
    shared_fused: bool = field(default=False, repr=False)
    biased: bool = field(default=False, repr=False)
    interleaved: bool = field(default=False, repr=False)
    alpha: float = field(default=0.0, repr=False)
    limit: float = field(default=0.0, repr=False)
    balance: float = field(default=0.0, repr=False, compare=False)  # of a run, not of the model
    sigmoid: bool = field(default=False, repr=False)
    correction: str = field(default="", repr=False)
    may_be_uncorrected: bool = field(default=False, repr=False)
    correction_rows: bool = field(default=False, repr=False)
    corrects_logits: bool = field(default=False, repr=False)
    normalize_eps: float = field(default=0.0, repr=False)
    mixer: float | None = field(default=None, repr=False)
    scales_input: bool = field(default=False, repr=False)
    adapted: bool = field(default=True, repr=False)
    groups: int = field(default=1, repr=False)
    top_groups: int = field(default=1, repr=False)
    groups_by_best: bool = field(default=False, repr=False)
    share_scale: float = field(default=1.0, repr=False)
    shared_scale: float = field(default=1.0, repr=False)
    norms: tuple[str, str, str] | None = field(default=None, repr=False)
    router_scale: str = field(default="", repr=False)
    share_scales: str = field(default="", repr=False)
    gated: bool = field(default=True, repr=False)
    latent_width: int = field(default=0, repr=False)
    latent_projections: tuple[str, str] = field(default=("", ""), repr=False)

    @property
    def first(self) -> str:
        """Return the name of the weight that is applied to the experts' input."""
        return GATE_UP if self.gated else UP

    def shapes(self, hidden: int) -> dict[str, tuple[int, int, int]]:
        """Return the shapes [experts, out, in] by path within a layer."""
        outer = self.latent_width or hidden
        return {
            f"{self.module}.{self.first}": (self.count, (2 if self.gated else 1) * self.width, outer),
            f"{self.module}.{DOWN}": (self.count, outer, self.width),
        }

    def projections(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return the shapes [out, in] of the projections that every token uses by path within a layer."""
        found = self.shared_shapes(hidden)
        if self.latent_width:
            into, back = self.latent_projections
            found |= {into: (self.latent_width, hidden), back: (hidden, self.latent_width)}
        return found

    def shared_shapes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return the shapes [out, in] of the shared expert's projections by path within a layer."""
        if not self.shared_width:
            return {}
        if self.shared_fused:
            both = (2 * self.shared_width, hidden)
            return {f"{self.shared}.input_linear": both, f"{self.shared}.output_linear": (hidden, self.shared_width)}
        into = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        found = {f"{self.shared}.{part}": (self.shared_width, hidden) for part in into}
        return found | {f"{self.shared}.down_proj": (hidden, self.shared_width)}
