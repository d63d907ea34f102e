"""Frozen weights whose dequantized values stay on the device from step to step (--keep-dequantized).

Weights that save the most time per byte are kept first. A weight is dequantized in the forward, in the backward, and
once more if its layer is recomputed. Each time costs a launch and its bytes over the memory bandwidth, so small weights
save slightly more per byte (bench/notes/checkpointing.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgrad.autograd.tensor import Tensor
from wgrad.device.formats.frozen_weight import FrozenWeight
from wgrad.train.model.lora import expert_modules, linear_modules
from wgrad.train.model.model import Model
from wgrad.train.model.model_config import ModelConfig
from wgrad.train.model.stacks import parts_of, stack_of
from wgrad.train.model.streamed_weights import StreamedWeights
from wgrad.train.model.weights import EMBEDDING, HEAD
from wgrad.train.options.finetune_config import RunOptions

# Elements that are dequantized in the time of an empty launch: 8 µs on an H100, at 2.8 TB/s.
_LAUNCH_ELEMENTS = 11 << 20


@dataclass(frozen=True)
class Candidate:
    """Weights that are kept together or not at all: of one module, or of modules that are stacked.

    Attributes:
        modules: Paths of the modules.
        elements: Elements of all their weights.
        uses: How often a micro-batch dequantizes them.
        experts: Experts in each weight; 0: no experts.
        dense: It is not quantized: the output layer, which is rounded and reordered in place of dequantized.
    """

    modules: tuple[str, ...]
    elements: int
    uses: int
    experts: int = 0
    dense: bool = False

    @property
    def worth(self) -> float:
        """Relative time saved per element."""
        if self.dense:
            return math.inf  # the loss multiplies with it once for every 256 tokens or so
        return self.uses * (1 + _LAUNCH_ELEMENTS / self.elements)


@dataclass(frozen=True)
class Dequantized:
    """Weights that are kept dequantized.

    Attributes:
        sizes: Bytes on the device of each candidate, kept or not; 0 if its matmuls decode it themselves.
        count: How many candidates are kept, from the first on.
    """

    sizes: tuple[int, ...] = ()
    count: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the kept weights."""
        return sum(self.sizes[: self.count])


def candidates(model: ModelConfig, recomputed: int) -> list[Candidate]:
    """Return all weights of the layers, and the output layer, the first to be kept first.

    recomputed: number of recomputed layers.
    """
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
        last = module.endswith(model.down_proj)  # a recomputation does not need its output
        found.append(Candidate(parts, elements, _uses(module, 0 if last else recomputed)))
    head = EMBEDDING if model.tie_word_embeddings else HEAD
    found.append(Candidate((head,), model.vocab_size * model.table_width, 0, dense=True))
    for module, shape in expert_modules(model).items():
        found.append(Candidate((module,), int(np.prod(shape)), _uses(module, recomputed), shape[0]))
    return sorted(found, key=lambda candidate: -candidate.worth)


def _uses(module: str, recomputed: int) -> int:
    of_layer = module.startswith("model.layers.")
    return 3 if of_layer and int(module.split(".")[2]) < recomputed else 2


def kept_count(config: RunOptions, of: int) -> int:
    """Return how many of the candidates --keep-dequantized keeps; none while it is not settled."""
    asked = 0 if config.full or config.stream_weights == "on" else config.keep_dequantized
    return of if asked is True else min(int(asked or 0), of)


def kept_share(config: RunOptions, model: ModelConfig, recomputed: int) -> float:
    """Return the fraction of a micro-batch's dequantization, in elements, that kept weights save."""
    every = [candidate for candidate in candidates(model, recomputed) if not candidate.dense]
    elements = [candidate.uses * candidate.elements for candidate in every]
    return sum(elements[: kept_count(config, len(every))]) / sum(elements)


def _weights_of(model: Model, candidate: Candidate) -> list[Any]:
    """Return the frozen weights of a candidate."""
    if candidate.dense:
        frozen = not isinstance(model.head, (FrozenWeight, Tensor))
        return [model.head] if frozen else []
    return [weight for weight in model.used_weights(candidate.modules) if isinstance(weight, FrozenWeight)]


def keep_dequantized(model: Model, config: RunOptions) -> Dequantized:
    """Dequantize the weights that --keep-dequantized keeps."""
    if config.full or isinstance(model.weights, StreamedWeights):
        return Dequantized()
    every = candidates(model.config, model.recomputed)
    count, tokens = kept_count(config, len(every)), config.rows * config.max_length
    found = []
    for candidate in every:
        chosen = model.config.experts.chosen if candidate.experts and model.config.experts else 1
        rows = tokens * chosen, model.dtype, candidate.experts
        weights = _weights_of(model, candidate)
        size = sum(model.device.dequantized_bytes(weight, *rows) for weight in weights)
        found.append((size, weights, rows, candidate.modules))
    found.sort(key=lambda of_candidate: not of_candidate[0])  # last those of which nothing can be kept
    for _, weights, rows, modules in found[:count]:
        for weight in weights:
            model.device.keep_dequantized(weight, *rows)
        for _, layer, module in (name.removeprefix("model.").split(".", 2) for name in modules if ".layers." in name):
            model.dequantized[int(layer)] = (*model.dequantized.get(int(layer), ()), module)
    return Dequantized(tuple(size for size, *_ in found), count)
