"""Low-rank adapters: their modules, scales, start values, and terms in products.

Sources: LoRA (arXiv 2106.09685), rank-stabilized scale (arXiv 2312.03732), DoRA (arXiv 2402.09353); names and matching
rules are PEFT's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from wgrad.autograd.tensor import Tensor
from wgrad.device.contract import Array
from wgrad.device.errors import WgradError
from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.train.model.lora_variants import OWN, LoraVariant, factors_of, starts, variant_of
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.patterns import NO_PATTERN, check_patterns
from wgrad.train.model.weights import WholeModules, outer_projections, projection_shapes, whole_modules

ALL_LINEAR = "all-linear"
ExpertModules = Mapping[str, tuple[int, int, int]]
MAGNITUDE = ".lora_magnitude_vector"  # end of the names of DoRA's magnitudes
_BY_NAME = r"(.*\.)?(PATTERN)$"  # matches a key of rank_pattern


@dataclass(frozen=True)
class LoraConfig:
    """Configuration of an adapter, with PEFT's rules.

    target_modules: names or path endings, one regular expression, or "all-linear". modules_to_save: names or path
    endings of modules that are trained whole. target_parameters: names or path endings of weights of all experts of a
    layer.
    """

    r: int
    alpha: float
    dropout: float = 0.0
    rslora: bool = False
    target_modules: tuple[str, ...] | str = ALL_LINEAR
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    modules_to_save: tuple[str, ...] = ()
    dora: bool = False
    target_parameters: tuple[str, ...] = ()
    variant: str = ""  # a name in lora_variants.py
    unread: tuple[str, ...] = ()  # keys of its file that nothing reads

    def saves(self, module: str) -> bool:
        """Return whether a module is trained whole."""
        return any(module.endswith(name) for name in self.modules_to_save)

    def rank_of(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.r))

    def alpha_of(self, module: str) -> float:
        return float(_by_pattern(self.alpha_pattern, module, self.alpha))

    def renamed(self, names: Mapping[str, str]) -> LoraConfig:
        """Return this configuration for renamed modules, listed one by one. names: new names by the old ones."""
        ranks = {new: self.rank_of(module) for module, new in names.items()}
        alphas = {new: self.alpha_of(module) for module, new in names.items()}
        rank_pattern = {name: r for name, r in ranks.items() if r != self.r}
        alpha_pattern = {name: alpha for name, alpha in alphas.items() if alpha != self.alpha}
        if self.target_parameters:  # whose names stay
            rank_pattern |= {name: r for name, r in self.rank_pattern.items() if name not in rank_pattern}
            alpha_pattern |= {name: alpha for name, alpha in self.alpha_pattern.items() if name not in alpha_pattern}
        targets = tuple(names.values())
        return replace(self, target_modules=targets, rank_pattern=rank_pattern, alpha_pattern=alpha_pattern)

    def scaling_of(self, module: str) -> float:
        """Return alpha / r, or alpha / sqrt(r) with rsLoRA, of this module."""
        alpha, r = self.alpha_of(module), self.rank_of(module)
        return alpha / math.sqrt(r) if self.rslora else alpha / r


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    for pattern, value in patterns.items():
        try:
            if re.match(_BY_NAME.replace("PATTERN", pattern), module):
                return value
        except NO_PATTERN as error:
            raise WgradError(f"--adapter: pattern {pattern!r} is no regular expression: {error}") from error
    return default


def check_all_patterns(lora: LoraConfig, modules: Sequence[str], source: str) -> None:
    """Raise WgradError if a regular expression of an adapter takes too long. source: its file."""
    forms = [(_BY_NAME, pattern) for pattern in (*lora.rank_pattern, *lora.alpha_pattern)]
    if isinstance(lora.target_modules, str):
        forms.append((r"(?:PATTERN)\Z", lora.target_modules))
    check_patterns(forms, modules, source)


def linear_modules(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the shapes [out, in] of all projections of the decoder, except head and experts, by path."""
    of_layers = {
        f"model.layers.{i}.{name}": shape
        for i in range(config.num_hidden_layers)
        for name, shape in projection_shapes(config, i).items()
    }
    return of_layers | outer_projections(config)


def expert_modules(config: ModelConfig) -> ExpertModules:
    """Return the shapes [experts, out, in] of the weights of each layer's experts by path."""
    return {
        f"model.layers.{i}.{name}": shape
        for i in range(config.num_hidden_layers)
        if config.experts is not None and config.experts.adapted and config.has_experts(i)
        for name, shape in config.experts.shapes(config.hidden_size).items()
    }


def adaptable(config: ModelConfig) -> tuple[dict[str, tuple[int, int]], WholeModules, ExpertModules]:
    """Return all modules that an adapter of this model may have, as arguments of `load_adapter`."""
    return linear_modules(config), whole_modules(config), expert_modules(config)


def match_targets(targets: Sequence[str] | str, modules: Sequence[str], option: str = "--target-modules") -> list[str]:
    """Return the modules that get an adapter, in the model's order.

    A list matches whole names and path endings; a string is a regular expression for the whole path, or "all-linear".

    Raises:
        WgradError: A target matches nothing; the message names the modules of the model.
    """
    available = sorted({own_name(m) for m in modules})

    def nothing(target: str) -> WgradError:
        return WgradError(f"{option}: {target!r} matches no projection of this model: it has {', '.join(available)}")

    if isinstance(targets, str):
        if targets == ALL_LINEAR:
            return list(modules)
        try:
            found = [m for m in modules if re.fullmatch(targets, m)]
        except NO_PATTERN as error:
            raise WgradError(f"{option}: {targets!r} is no regular expression: {error}") from error
        if not found:
            raise nothing(targets)
        return found
    for target in targets:
        if not any(ends_with(m, target) for m in modules):
            raise nothing(target)
    return [m for m in modules if any(ends_with(m, t) for t in targets)]


def own_name(module: str) -> str:
    """Return the name at the end of a module's path; for a module in a list, with the list's name."""
    before, _, last = module.rpartition(".")
    return f"{before.rpartition('.')[2]}.{last}" if last.isdigit() else last


def ends_with(module: str, target: str) -> bool:
    """Return whether `target` is this module's path or the end of it."""
    return module == target or module.endswith("." + target)


def lora_shapes(
    lora: LoraConfig,
    modules: Mapping[str, tuple[int, int]],
    option: str = "--target-modules",
    experts: ExpertModules = MappingProxyType({}),
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all adapter matrices by name.

    These are `<module>.lora_A` [r, in] and `<module>.lora_B` [out, r], of experts with their number as the first axis,
    and with DoRA `<module>.lora_magnitude_vector` [out]. option: as for `match_targets`.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for module in match_targets(lora.target_modules, list(modules), option):
        out, width = modules[module]
        r = lora.rank_of(module)
        shapes[module + ".lora_A"] = (r, width)
        shapes[module + ".lora_B"] = (out, r)
        if lora.dora:
            shapes[module + MAGNITUDE] = (out,)
        if lora.variant:
            shapes |= {module + name: value.shape for name, value in starts(lora.variant, r, out, width).items()}
    for module in match_targets(lora.target_parameters, list(experts), option):
        count, out, width = experts[module]
        r = lora.rank_of(module)
        shapes[module + ".lora_A"], shapes[module + ".lora_B"] = (count, r, width), (count, out, r)
    return shapes


def init_lora(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Return float32 start values: A ~ U(-1/sqrt(in), 1/sqrt(in)) as PEFT's kaiming_uniform(a = sqrt 5), and B = 0.

    Magnitudes are 0 at first, since they depend on the weights.
    """
    # The spawn key keeps these numbers apart from those of the data order, which use the same seed.
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(1,))))
    values = {}
    for name, shape in shapes.items():
        if not name.endswith(".lora_A"):
            values[name] = np.zeros(shape, np.float32)
        else:
            bound = 1.0 / math.sqrt(shape[-1])
            values[name] = generator.uniform(-bound, bound, shape).astype(np.float32)
    return values


def unwritten(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return zeros in place of start values, for a dry run: all in the same memory."""
    nothing = np.zeros(max(map(math.prod, shapes.values()), default=0), np.float32)
    return {name: nothing[: math.prod(shape)].reshape(shape) for name, shape in shapes.items()}


def variant_starts(lora: LoraConfig, modules: Mapping[str, tuple[int, int]]) -> dict[str, np.ndarray]:
    """Return the start values of a variant's own parameters by name. modules: those that may have an adapter."""
    if not lora.variant:
        return {}
    adapted = match_targets(lora.target_modules, list(modules))
    sizes = {module: (lora.rank_of(module), *modules[module]) for module in adapted}
    return {m + name: value for m, size in sizes.items() for name, value in starts(lora.variant, *size).items()}


def is_whole(name: str) -> bool:
    """Return whether an adapter's tensor is a whole weight instead of a low-rank factor."""
    return not name.endswith((".lora_A", ".lora_B", MAGNITUDE)) and OWN not in name


def whole_shapes(lora: LoraConfig, modules: WholeModules) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that are trained whole by name. modules: those that may be trained whole."""
    saved = [tensors for module, tensors in modules.items() if lora.saves(module)]
    return {name: shape for tensors in saved for name, shape in tensors.items()}


@dataclass(frozen=True)
class LoraModule:
    """The adapter of one module: a [r, in], b [out, r] (of experts with their number as the first axis), its scale, and
    the stream of its dropout masks. With DoRA the magnitude [out], and, if the adapter is frozen, 1 / length of each
    row of the weight with the adapter [out]."""

    a: Tensor
    b: Tensor
    scaling: float
    stream: int
    magnitude: Tensor | None = None
    inverse: Array | None = None
    rounded: FrozenWeight | None = None  # replaces weight and term (qat.py)
    variant: LoraVariant | None = None
    own: Mapping[str, Tensor] = field(default_factory=dict)  # parameters of a variant
    shares: tuple[tuple[int, int], ...] = ()  # index and rank of each of several adapters (adapter_mix.py)

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A and B of the term."""
        return (self.a, self.b) if self.variant is None else factors_of(self.variant, self.a, self.b, self.own)


@dataclass(frozen=True)
class Adapter:
    """All adapters of a model by module path. whole: weights that replace the base model's, by name."""

    config: LoraConfig
    modules: Mapping[str, LoraModule]
    whole: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def from_tensors(cls, config: LoraConfig, tensors: Mapping[str, Tensor]) -> Adapter:
        """Return an adapter of these tensors: those that `lora_shapes` names, and whole weights."""
        names = [n.removesuffix(".lora_A") for n in tensors if n.endswith(".lora_A")]
        of_variants = {n: t for n, t in tensors.items() if OWN in n}
        return cls(
            config,
            {
                name: LoraModule(
                    tensors[name + ".lora_A"],
                    tensors[name + ".lora_B"],
                    config.scaling_of(name),
                    stream,
                    tensors.get(name + MAGNITUDE),
                    variant=variant_of(config.variant, "--lora-variant") if config.variant else None,
                    own={n.removeprefix(name + OWN): t for n, t in of_variants.items() if n.startswith(name + OWN)},
                )
                for stream, name in enumerate(names)
            },
            {name: tensor for name, tensor in tensors.items() if is_whole(name)},
        )
