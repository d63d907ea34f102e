"""The layers of a model one after another, with what of each stays for its backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from wgrad.autograd.checkpoint import checkpoint
from wgrad.autograd.offload import Offloading
from wgrad.autograd.tensor import Tensor
from wgrad.train.model.model_config import ModelConfig


@dataclass(frozen=True)
class Beside:
    """Tensors that layers are given besides the stream: embeddings of their own [N, P], and keys and values
    [B, T, G, D] of a layer before them."""

    config: ModelConfig
    inputs: Sequence[Tensor] = ()
    keys: dict[int, Sequence[Tensor]] = field(default_factory=dict)

    def of(self, layer: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """-> what a layer has to itself, and what it shares with others."""
        return self.inputs[layer : layer + 1], self.keys.get(self.config.kv_source(layer), ())

    def take(self, layer: int, made: Tensor | tuple[Tensor, ...]) -> Tensor:
        """Keep what a layer made besides the stream, which is returned."""
        if isinstance(made, Tensor):
            return made
        h, *self.keys[layer] = made
        return h


def through_layers(
    layer: Callable[..., Tensor | tuple[Tensor, ...]],
    h: Tensor,
    beside: Beside,
    *,
    recomputed: int,
    offload: int,
    keep_attention: bool,
    passed: Mapping[int, Callable[[], None]],
) -> Tensor:
    """[N, C] -> [N, C]: the residual stream through all layers, each called with its number, the stream and what
    `beside` has for it; it returns the stream, and what `beside` keeps.

    recomputed: so many, from the first on, keep their input alone, and attention's output with keep_attention; offload:
    of these so many keep it in main memory. The last layers are those that keep all, which is gone by the time that
    another is recomputed. passed: as of `Model`.
    """
    # The backward begins with the last layer: what that was given would leave in vain.
    layers = beside.config.num_hidden_layers
    offloaded = min(offload, recomputed, layers - 1)
    offloading = Offloading(h.device, offloaded) if offloaded else None
    for index in range(layers):
        if index in passed:
            h = h.watched(passed[index])
        own, shared = beside.of(index)
        if index < recomputed:
            made = checkpoint(partial(layer, index), h, *own, shared=shared, offloading=offloading, keep=keep_attention)
            h = beside.take(index, made)
            continue
        h = beside.take(index, layer(index, h, *own, *shared))
        if offloading is not None and index == recomputed:
            offloading.leave_last()
            h = h.watched(offloading.bring_last)
    return h
