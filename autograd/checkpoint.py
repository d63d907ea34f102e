"""Activation checkpointing: drop the activations of a part of the model, and recompute them in the backward.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (2016). Dropout is counter-based, so the second
forward draws the same masks, and gradients have the same bits.
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
from wgrad.device.repeats import Results


class _Stretch(threading.local):
    kept: list[Sequence[Array]] | None = None  # results of `once` in the current part; None: they are not kept
    matmuls = False  # whether `once` gets those of matmuls, too
    staying = False  # whether the results of `once` stay on the device


class Staying(tuple[Array, ...]):
    """Results of `once` that stay on the device where others are offloaded."""

    __slots__ = ()


_stretch = _Stretch()


def once(compute: Callable[[], Sequence[Array]]) -> Sequence[Array]:
    """Return compute(), or during a recomputation the arrays of the first time, if `checkpoint` keeps them."""
    if _stretch.kept is None:
        return compute()
    if is_recomputing():
        return _stretch.kept.pop(0)
    _stretch.kept.append(made := Staying(compute()) if _stretch.staying else compute())
    return made


def keeps_matmuls() -> bool:
    """Return whether outputs of matmuls are computed by `once`."""
    return _stretch.matmuls


@contextmanager
def keeping_matmuls(kept: bool = True, staying: bool = False) -> Iterator[None]:
    """Compute the outputs of matmuls by `once` within the block, or not, in a forward and its recomputation alike.

    staying: Whether the results of `once` stay on the device where others are offloaded.
    """
    previous, (_stretch.matmuls, _stretch.staying) = (_stretch.matmuls, _stretch.staying), (kept, staying)
    try:
        yield
    finally:
        _stretch.matmuls, _stretch.staying = previous


def results_kept() -> list[Sequence[Array]] | None:
    """Return the results of `once` in the current part so far, or those that its recomputation still has to take."""
    return _stretch.kept


@contextmanager
def keeping(kept: list[Sequence[Array]] | None) -> Iterator[None]:
    """Keep the results of `once` in a list, or take them from it in a recomputation; None: keep none."""
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
    begin: Callable[[], None] = lambda: None,
    repeat: Callable[..., Results] = lambda kind, work, inputs: work(),
) -> Any:
    """Return fn(*tensors, *shared), and save only these arguments; the backward recomputes fn.

    Parameters that fn uses by itself get their gradients in the backward. All outputs count as requiring a gradient,
    because it is not known what fn uses.

    Args:
        fn: Returns a Tensor or a tuple of Tensors, the same at each call.
        *tensors: Arguments, saved on the device or offloaded.
        shared: Further arguments, which are never offloaded, because others save them too.
        offloading: Where to offload the saved tensors; None: keep them on the device.
        keep: Whether to save the results of `once` too: attention outputs, and LoRA's products with A.
        begin: Called before fn each time.
        repeat: A `Repeats` for the recomputation, of parts whose fn and arguments are alike.
    """
    if not is_recording():
        begin()
        return fn(*tensors, *shared)
    kept: list[Sequence[Array]] | None = [] if keep else None
    begin()
    with recording(False), keeping(kept):
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
            offloading.put(
                [*saved, *(a for arrays in kept or () for a in arrays)],
                [False] * len(saved) + [isinstance(arrays, Staying) for arrays in kept or () for _ in arrays],
            ),
        )
        ctx.kept = kept and [len(arrays) for arrays in kept]
    del saved, kept
    wrapped = tuple(Tensor(out.data, out.device) for out in outputs)
    attach(ctx, lambda *grads: _recompute(fn, ctx, grads, begin, repeat), edges, wrapped)
    return wrapped if isinstance(result, tuple) else wrapped[0]


def _recompute(
    fn: Callable[..., Any],
    ctx: Context,
    grads: Sequence[Array | None],
    begin: Callable[[], None],
    repeat: Callable[..., Results],
) -> list[Array | None]:
    inputs, kept = (ctx.saved, ctx.kept) if ctx.saved else _taken(ctx)
    leaves = [Tensor(data, ctx.device, needs) for data, needs in zip((*inputs, *ctx.shared), ctx.needs_grad)]
    del inputs
    begin()

    def work() -> Results:
        with recomputing(), keeping(kept):
            result = fn(*leaves)
        run_backward(result if isinstance(result, tuple) else (result,), grads)
        return [leaf.gradient for leaf in leaves], None

    kind = *((leaf.shape, leaf.dtype, leaf.requires_grad) for leaf in leaves), *(grad is None for grad in grads)
    return repeat(kind, work, kept)[0]


def _taken(ctx: Context) -> tuple[list[Array], list[Sequence[Array]] | None]:
    """Return the offloaded arguments, and results of `once`."""
    arrays = iter(ctx.offloading.take(ctx.offloaded))
    inputs = list(islice(arrays, len(ctx.needs_grad) - len(ctx.shared)))
    return inputs, ctx.kept and [tuple(islice(arrays, count)) for count in ctx.kept]
