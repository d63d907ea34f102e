"""Running the layers of a model in order, and choosing which activations are kept for the backward."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from wgrad.autograd.checkpoint import Staying, checkpoint, results_kept
from wgrad.autograd.offload import Offloading
from wgrad.autograd.tensor import Tensor, is_recording
from wgrad.device.repeats import Repeats, Results
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


def _run(
    repeats: Repeats,
    kind_of: Callable[[int], Hashable],
    layer: Callable[..., Tensor | tuple[Tensor, ...]],
    index: int,
    h: Tensor,
    *others: Tensor,
) -> Tensor | tuple[Tensor, ...]:
    """Return the results of a layer. A dry run may take the memory of one before, where no tape is recorded."""
    if not repeats.is_used or others or is_recording():
        return layer(index, h, *others)
    kept, device = results_kept(), h.device

    def work() -> Results:
        first = len(kept or ())
        made = layer(index, h)
        tensors = made if isinstance(made, tuple) else (made,)
        entries = (kept or [])[first:]
        arrays = [*(tensor.data for tensor in tensors), *(array for entry in entries for array in entry)]
        forms = [(isinstance(entry, Staying), len(entry)) for entry in entries]
        return arrays, (isinstance(made, tuple), len(tensors), forms)

    before = len(kept or ())
    arrays, (several, count, forms) = repeats((kind_of(index), kept is None), work)
    made = tuple(Tensor(array, device) for array in arrays[:count])
    if kept is not None and len(kept) == before:
        rest = iter(arrays[count:])
        kept += [(Staying if stays else tuple)(islice(rest, number)) for stays, number in forms]
    return made if several else made[0]


def _again(repeats: Repeats, kind: Hashable, of_arguments: Hashable, *work: Any) -> Results:
    return repeats((kind, of_arguments), *work)


def through_layers(
    layer: Callable[..., Tensor | tuple[Tensor, ...]],
    h: Tensor,
    beside: Beside,
    *,
    recomputed: int,
    offload: int,
    keep_attention: bool,
    passed: Mapping[int, Callable[[], None]],
    begin: Callable[[int], None],
    kind_of: Callable[[int], Hashable],
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
        begin: Called with a layer's index before each of its forwards.
        kind_of: Returns a layer's kind: layers of the same kind take the same memory.
    """
    # The backward begins with the last layer, so offloading its inputs would be useless.
    layers = beside.config.num_hidden_layers
    offloaded = min(offload, recomputed, layers - 1)
    offloading = Offloading(h.device, offloaded) if offloaded else None
    once, backward = partial(_run, Repeats(h.device), kind_of, layer), Repeats(h.device)
    for index in range(layers):
        if index in passed:
            h = h.watched(passed[index])
        own, shared = beside.of(index)
        if index < recomputed:
            how: dict[str, Any] = {"offloading": offloading, "keep": keep_attention, "begin": partial(begin, index)}
            if backward.is_used and not own and not shared:
                how["repeat"] = partial(_again, backward, kind_of(index))
            h = beside.take(index, checkpoint(partial(once, index), h, *own, shared=shared, **how))
            continue
        begin(index)
        h = beside.take(index, once(index, h, *own, *shared))
        if offloading is not None and index == recomputed:
            offloading.leave_last()
            h = h.watched(offloading.bring_last)
    return h
