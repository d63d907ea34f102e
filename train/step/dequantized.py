"""Frozen weights whose dequantised values stay on the device from step to step (--keep-dequantized).

Which are kept first: those that save most time per byte. A weight is dequantised in the forward, in the backward, and
where its layer is recomputed once more. Each time that takes a launch, and bytes over the rate of memory, so that small
weights save a little more per byte (bench/notes/checkpointing.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.train.model.lora import expert_modules, linear_modules
from wgrad.train.model.model import Model
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.stacks import parts_of, stack_of
from wgrad.train.model.streamed_weights import StreamedWeights
from wgrad.train.options.finetune_config import RunOptions

# Elements that are dequantised in the time of a launch that does nothing else: 8 µs on an H100, at 2.8 TB/s.
_LAUNCH_ELEMENTS = 11 << 20


@dataclass(frozen=True)
class Candidate:
    """Weights that are kept together or not at all: of one module, or of those that a stack may have.

    Attributes:
        modules: Their paths.
        elements: Numbers in all of them.
        uses: How often a micro-batch dequantises them.
        experts: Experts in each; 0: none.
    """

    modules: tuple[str, ...]
    elements: int
    uses: int
    experts: int = 0

    @property
    def worth(self) -> float:
        """Time saved by an element, in no unit."""
        return self.uses * (1 + _LAUNCH_ELEMENTS / self.elements)


@dataclass(frozen=True)
class Dequantized:
    """Weights that are kept dequantised.

    Attributes:
        sizes: Bytes on the device of each candidate, kept or not; 0 where its matmuls decode it inside.
        count: Candidates that are kept, the first ones.
    """

    sizes: tuple[int, ...] = ()
    count: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of those that are kept."""
        return sum(self.sizes[: self.count])


def candidates(model: ModelConfig, recomputed: int) -> list[Candidate]:
    """Return all weights of the layers, the first to be kept first. recomputed: layers, from the first on."""
    shapes = linear_modules(model)
    stacks = {module: parts_of(stack) for module in shapes if (stack := stack_of(module)) is not None}
    stacks = {last: parts for last, parts in stacks.items() if shapes.keys() >= set(parts)}
    stacked = {part for parts in stacks.values() for part in parts}
    found = []
    for module in shapes:
        if module in stacked and module not in stacks:
            continue
        parts = tuple(stacks.get(module, [module]))
        elements = sum(int(np.prod(shapes[part])) for part in parts)
        last = module.endswith(model.down_proj)  # of which a recomputation needs no output
        found.append(Candidate(parts, elements, _uses(module, 0 if last else recomputed)))
    for module, shape in expert_modules(model).items():
        found.append(Candidate((module,), int(np.prod(shape)), _uses(module, recomputed), shape[0]))
    return sorted(found, key=lambda candidate: -candidate.worth)


def _uses(module: str, recomputed: int) -> int:
    of_layer = module.startswith("model.layers.")
    return 3 if of_layer and int(module.split(".")[2]) < recomputed else 2


def kept_count(config: RunOptions, of: int) -> int:
    """Return how many of the candidates --keep-dequantized has kept; where it is open still, none."""
    asked = 0 if config.full or config.stream_weights == "on" else config.keep_dequantized
    return of if asked is True else min(int(asked or 0), of)


def kept_share(config: RunOptions, model: ModelConfig, recomputed: int) -> float:
    """Return the part of all dequantised elements of a micro-batch that need not be, as they are kept."""
    every = candidates(model, recomputed)
    elements = [candidate.uses * candidate.elements for candidate in every]
    return sum(elements[: kept_count(config, len(every))]) / sum(elements)


def keep_dequantized(model: Model, config: RunOptions) -> Dequantized:
    """Dequantise the weights that --keep-dequantized keeps -> all candidates' bytes, and how many are kept."""
    if config.full or isinstance(model.weights, StreamedWeights):
        return Dequantized()
    every = candidates(model.config, model.recomputed)
    count, tokens = kept_count(config, len(every)), config.rows * config.max_length
    sizes = []
    for number, candidate in enumerate(every):
        chosen = model.config.experts.chosen if candidate.experts and model.config.experts else 1
        rows = tokens * chosen, model.dtype, candidate.experts
        weights = [weight for weight in model.used_weights(candidate.modules) if isinstance(weight, FrozenWeight)]
        sizes.append(sum(model.device.dequantized_bytes(weight, *rows) for weight in weights))
        for weight in weights if number < count else ():
            model.device.keep_dequantized(weight, *rows)
    return Dequantized(tuple(sizes), count)
