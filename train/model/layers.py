"""The layers of a model one after another, with what of each stays for its backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from wgrad.autograd.checkpoint import checkpoint
from wgrad.autograd.offload import Parking
from wgrad.autograd.tensor import Tensor


def through_layers(
    layer: Callable[[int, Tensor], Tensor],
    h: Tensor,
    layers: int,
    *,
    recomputed: int,
    offload: int,
    keep_attention: bool,
    passed: Mapping[int, Callable[[], None]],
) -> Tensor:
    """[N, C] -> [N, C]: the residual stream through all layers, each called with its number.

    recomputed: so many, from the first on, keep their input alone, and attention's output with keep_attention; offload:
    of these so many keep it in main memory. The last layers are those that keep all, which is gone by the time that
    another is recomputed. passed: as of `Model`.
    """
    # The backward begins with the last layer: what that was given would leave in vain.
    parked = min(offload, recomputed, layers - 1)
    parking = Parking(h.device, parked) if parked else None
    for index in range(layers):
        if index in passed:
            h = h.watched(passed[index])
        if index < recomputed:
            h = checkpoint(partial(layer, index), h, parking=parking, keep=keep_attention)
            continue
        h = layer(index, h)
        if parking is not None and index == recomputed:
            parking.leave_last()
            h = h.watched(parking.bring_last)
    return h
