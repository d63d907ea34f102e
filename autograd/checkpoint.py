"""Activation checkpointing: forget what a stretch of the model saves, and compute it again in the backward.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (2016). Dropout is counter-based, so the second
forward draws the same masks and the gradients are the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from wgrad.autograd.function import Context, attach
from wgrad.autograd.offload import Parking
from wgrad.autograd.tensor import (
    Tensor,
    edge_of,
    is_recomputing,
    is_recording,
    recomputing,
    recording,
    run_backward,
)
from wgrad.device.contract import Array


class _Stretch(threading.local):
    kept: list[Any] | None = None  # what `once` computed in the stretch that runs now, where that is kept


_stretch = _Stretch()


def once(compute: Callable[[], Any]) -> Any:
    """compute() -> arrays; in a stretch that is made again those of before, where `checkpoint` is told to keep them."""
    if _stretch.kept is None:
        return compute()
    if is_recomputing():
        return _stretch.kept.pop(0)
    _stretch.kept.append(made := compute())
    return made


@contextmanager
def _keeping(kept: list[Any] | None) -> Iterator[None]:
    previous, _stretch.kept = _stretch.kept, kept
    try:
        yield
    finally:
        _stretch.kept = previous


def checkpoint(fn: Callable[..., Any], *tensors: Tensor, parking: Parking | None = None, keep: bool = False) -> Any:
    """fn(*tensors) -> Tensor or tuple of Tensors, saving only the arguments: on the device, or where `parking` has
    them. keep: and on the device what `once` computes, which is attention.

    Parameters that fn reaches by itself get their gradients in the backward. fn must compute the same when called
    again. Every output counts as requiring a gradient: what fn reaches cannot be seen from here.
    """
    if not is_recording():
        return fn(*tensors)
    kept: list[Any] | None = [] if keep else None
    with recording(False), _keeping(kept):
        result = fn(*(t.detach() for t in tensors))
    outputs = result if isinstance(result, tuple) else (result,)
    edges = [edge_of(t) for t in tensors]
    ctx = Context("checkpoint", tensors[0].device, edges)
    ctx.kept, saved = kept, [t.data for t in tensors]
    if parking is None:
        ctx.save(*saved)
    else:
        ctx.parking, ctx.parked = parking, parking.put(saved)
    del saved
    wrapped = tuple(Tensor(out.data, out.device) for out in outputs)
    attach(ctx, lambda *grads: _recompute(fn, ctx, grads), edges, wrapped)
    return wrapped if isinstance(result, tuple) else wrapped[0]


def _recompute(fn: Callable[..., Any], ctx: Context, grads: Sequence[Array | None]) -> list[Array | None]:
    saved = ctx.saved or ctx.parking.take(ctx.parked)
    leaves = [Tensor(data, ctx.device, needs) for data, needs in zip(saved, ctx.needs_grad)]
    del saved
    with recomputing(), _keeping(ctx.kept):
        result = fn(*leaves)
    run_backward(result if isinstance(result, tuple) else (result,), grads)
    return [leaf.grad for leaf in leaves]
