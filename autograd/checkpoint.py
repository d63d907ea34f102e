"""Activation checkpointing: forget what a stretch of the model saves, and compute it again in the backward.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (2016). Dropout is counter-based, so the second
forward draws the same masks and the gradients are the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from wgrad.autograd.function import Context, attach
from wgrad.autograd.offload import Offloading
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
    kept: list[Sequence[Array]] | None = None  # what `once` computed in the stretch that runs now, where that is kept


_stretch = _Stretch()


def once(compute: Callable[[], Sequence[Array]]) -> Sequence[Array]:
    """compute() -> arrays; in a stretch that is made again those of before, where `checkpoint` is told to keep them."""
    if _stretch.kept is None:
        return compute()
    if is_recomputing():
        return _stretch.kept.pop(0)
    _stretch.kept.append(made := compute())
    return made


@contextmanager
def _keeping(kept: list[Sequence[Array]] | None) -> Iterator[None]:
    previous, _stretch.kept = _stretch.kept, kept
    try:
        yield
    finally:
        _stretch.kept = previous


def checkpoint(
    fn: Callable[..., Any],
    *tensors: Tensor,
    shared: Sequence[Tensor] = (),
    offloading: Offloading | None = None,
    keep: bool = False,
) -> Any:
    """fn(*tensors, *shared) -> Tensor or tuple of Tensors, saving only the arguments: on the device, or as `offloading`
    keeps them, but for `shared`, which others keep too. keep: and with them what `once` computes, which is attention.

    Parameters that fn reaches by itself get their gradients in the backward. fn must compute the same when called
    again. Every output counts as requiring a gradient: what fn reaches cannot be seen from here.
    """
    if not is_recording():
        return fn(*tensors, *shared)
    kept: list[Sequence[Array]] | None = [] if keep else None
    with recording(False), _keeping(kept):
        result = fn(*(t.detach() for t in (*tensors, *shared)))
    outputs = result if isinstance(result, tuple) else (result,)
    edges = [edge_of(t) for t in (*tensors, *shared)]
    ctx = Context("checkpoint", tensors[0].device, edges)
    saved, ctx.shared = [t.data for t in tensors], [t.data for t in shared]
    if offloading is None:
        ctx.save(*saved)
        ctx.kept = kept
    else:
        ctx.offloading, ctx.offloaded = (
            offloading,
            offloading.put([*saved, *(a for arrays in kept or () for a in arrays)]),
        )
        ctx.kept = kept and [len(arrays) for arrays in kept]
    del saved, kept
    wrapped = tuple(Tensor(out.data, out.device) for out in outputs)
    attach(ctx, lambda *grads: _recompute(fn, ctx, grads), edges, wrapped)
    return wrapped if isinstance(result, tuple) else wrapped[0]


def _recompute(fn: Callable[..., Any], ctx: Context, grads: Sequence[Array | None]) -> list[Array | None]:
    inputs, kept = (ctx.saved, ctx.kept) if ctx.saved else _taken(ctx)
    leaves = [Tensor(data, ctx.device, needs) for data, needs in zip((*inputs, *ctx.shared), ctx.needs_grad)]
    del inputs
    with recomputing(), _keeping(kept):
        result = fn(*leaves)
    run_backward(result if isinstance(result, tuple) else (result,), grads)
    return [leaf.gradient for leaf in leaves]


def _taken(ctx: Context) -> tuple[list[Array], list[Sequence[Array]] | None]:
    """From where they were offloaded: the arguments, and what `once` computed."""
    arrays = iter(ctx.offloading.take(ctx.offloaded))
    inputs = list(islice(arrays, len(ctx.needs_grad) - len(ctx.shared)))
    return inputs, ctx.kept and [tuple(islice(arrays, count)) for count in ctx.kept]
