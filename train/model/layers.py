"""Running the layers of a model in order, and choosing which activations are kept for the backward."""

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
    """Inputs of layers besides the stream: per-layer embeddings [N, P], and an earlier layer's keys and values
    [B, T, G, D]."""

    config: ModelConfig
    inputs: Sequence[Tensor] = ()
    keys: dict[int, Sequence[Tensor]] = field(default_factory=dict)

    def of(self, layer: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return a layer's own inputs, and those that it shares with other layers."""
        return self.inputs[layer : layer + 1], self.keys.get(self.config.kv_source(layer), ())

    def take(self, layer: int, made: Tensor | tuple[Tensor, ...]) -> Tensor:
        """Keep a layer's results besides the stream, and return the stream."""
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
    """Return the residual stream [N, C] after all layers.

    Args:
        layer: Called with a layer's index, the stream and the inputs that `beside` has for it. It returns the stream
            and the tensors that `beside` keeps.
        h: The residual stream [N, C] before the layers.
        beside: Inputs of layers besides the stream.
        recomputed: Number of layers, from the first on, that keep only their input, and attention's output with
            keep_attention. The last layers keep everything: it is freed before other layers are recomputed.
        offload: Number of these layers that keep it in main memory.
        keep_attention: Whether recomputed layers keep attention's output.
        passed: As for `Model`.
    """
    # The backward begins with the last layer, so offloading its inputs would be useless.
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
