"""Mixture of experts: its sizes in a model, its weights' names, and what a layer computes.

Of all experts of a layer gate and up are one weight, or up alone, and down another; names are those of transformers 5.
Sources: Mixtral (arXiv 2401.04088), OLMoE (arXiv 2409.02060), Qwen3 (arXiv 2505.09388), gpt-oss (arXiv 2508.10925).
"""

from __future__ import annotations

from dataclasses import dataclass, field

GATE_UP, UP, DOWN = "gate_up_proj", "up_proj", "down_proj"
EXPERTS = ".experts"  # with which the path of the module that holds both ends


@dataclass(frozen=True)
class Experts:
    """count: of a layer; chosen: of a token. width: of one expert. layers: which have experts. normalize: the weights
    of the chosen ones add up to 1. module, router: their paths within a layer. files: how files name them, a key of
    `expert_files.LAYOUTS`. shared_width: of an expert that every token has besides (0: none), by a weight that depends
    on the token where there is a shared_gate; shared_fused: its gate and up are one projection. biased: experts and
    router have biases. interleaved: rows of gate and up take turns; limit, alpha: then their activation is
    `clamped_swiglu`. balance: the weight of the load-balancing loss, in training.

    sigmoid: the router's scores are sigmoids, else a softmax. correction: path of a number for each expert, which is
    added to its score where experts are chosen ("": none), correction_rows: [1, count]. normalize_eps: added to the
    sum of the chosen sigmoids by which each is divided. groups: of experts that follow one another, of which a token
    has the top_groups best, by their best expert where groups_by_best, else by their best two. share_scale: of the
    experts' weights; shared_scale: of the shared expert's output. mixer: the weight of each of the two best is a
    softmax's over those experts, without the better one, whose logit is at most this part of its own below (0: it is
    not). scales_input: a token's weight scales what its only expert reads, not what it makes. adapted: they may have
    adapters.

    norms: where layers have an MLP as well, whose output and that of the experts are added up: of the MLP's output,
    before the experts, and of their output; the router then has a norm of the stream, whose weight is router_scale
    [hidden], and divides its logits by the root of the width. share_scales: path of a factor for each expert's weight
    ("": none).

    gated: experts and the shared one multiply up by what the activation makes of gate; else they have no gate."""

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
    # No part of `repr`, by which checkpoints know a model: see `ModelConfig.identity`.
    shared_fused: bool = field(default=False, repr=False)
    biased: bool = field(default=False, repr=False)
    interleaved: bool = field(default=False, repr=False)
    alpha: float = field(default=0.0, repr=False)
    limit: float = field(default=0.0, repr=False)
    balance: float = field(default=0.0, repr=False, compare=False)  # of a run, not of the model
    sigmoid: bool = field(default=False, repr=False)
    correction: str = field(default="", repr=False)
    correction_rows: bool = field(default=False, repr=False)
    normalize_eps: float = field(default=0.0, repr=False)
    mixer: float = field(default=0.0, repr=False)
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

    @property
    def first(self) -> str:
        """The experts' weight that reads their input, by its name."""
        return GATE_UP if self.gated else UP

    def shapes(self, hidden: int) -> dict[str, tuple[int, int, int]]:
        """[experts, out, in] by path within a layer."""
        return {
            f"{self.module}.{self.first}": (self.count, (2 if self.gated else 1) * self.width, hidden),
            f"{self.module}.{DOWN}": (self.count, hidden, self.width),
        }

    def shared_shapes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """[out, in] of the shared expert's projections, by path within a layer."""
        if not self.shared_width:
            return {}
        if self.shared_fused:
            both = (2 * self.shared_width, hidden)
            return {f"{self.shared}.input_linear": both, f"{self.shared}.output_linear": (hidden, self.shared_width)}
        into = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        found = {f"{self.shared}.{part}": (self.shared_width, hidden) for part in into}
        return found | {f"{self.shared}.down_proj": (hidden, self.shared_width)}
