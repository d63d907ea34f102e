"""A stretch of the model that treats each row by itself, a few rows at a time, so that what it makes on the way never
stands in memory for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from wgrad.autograd.function import Context, attach
from wgrad.autograd.tensor import (
    Tensor,
    edge_of,
    is_recomputing,
    is_recording,
    recomputing,
    recording,
    run_backward,
)
from wgrad.device.contract import Array, Device
from wgrad.device.dry_run import chunk_starts

ROWS = 64  # chunks begin at multiples of it: a view must start at a multiple of 64 elements


def even_rows(rows: int, most: int) -> int:
    """Rows of a chunk where `rows` are dealt out to as few chunks of about `most` as possible, all about as large."""
    chunks = -(-rows // max(most, ROWS))
    return -(-rows // (chunks * ROWS)) * ROWS


def in_row_chunks(fn: Callable[..., Tensor], x: Tensor, rows: int, *others: Tensor, spent: bool = False) -> Tensor:
    """fn(x, *others) of x [N, C] and others [N, ...] -> [N, D], computed `rows` rows (a multiple of 64) at a time; the
    arguments alone are saved, and the backward computes fn again.

    spent: nothing else reads x's memory once the backward comes here: its gradient takes x's place in it, chunk by
    chunk.

    A frozen weight that the device decodes before its products is decoded once for all chunks, forward and backward.

    fn must treat each row by itself. Inside of `checkpoint` it must be the last thing there, and of x's shape and
    dtype: when the stretch is made again its output is not, because nobody reads it.
    """
    if is_recomputing():
        result = x.detach()  # of the shape and dtype of the output, in whose place it stands
    else:
        result = Tensor(_forward(fn, [x.data, *(other.data for other in others)], x.device, rows), x.device)
    if is_recording():
        edges = [edge_of(x), *map(edge_of, others)]
        ctx = Context("in_row_chunks", x.device, edges)
        ctx.save(x.data, *(other.data for other in others))
        attach(ctx, lambda dy: _backward(fn, ctx, dy, rows, spent), edges, [result])
    return result


def _part(array: Array, device: Device, first: int, rows: int) -> Array:
    columns = array.shape[1]
    return device.view(array, (min(rows, array.shape[0] - first), columns), first * columns)


def _forward(fn: Callable[..., Tensor], given: Sequence[Array], device: Device, rows: int) -> Array:
    out, count = None, given[0].shape[0]
    with recording(False), device.caching_dequantized():
        for first in chunk_starts(device, count, rows):
            made = fn(*(Tensor(_part(x, device, first, rows), device) for x in given)).data
            if out is None:
                out = device.empty((count, made.shape[1]), made.dtype)
            device.copy(made, _part(out, device, first, rows))
            del made
    return out


def _backward(fn: Callable[..., Tensor], ctx: Context, dy: Array, rows: int, spent: bool) -> Sequence[Array | None]:
    given, device = ctx.saved, ctx.device
    grads = [
        (x if spent and i == 0 else device.empty(x.shape, x.dtype)) if needs else None
        for i, (x, needs) in enumerate(zip(given, ctx.needs_grad))
    ]
    with device.caching_dequantized():
        for first in chunk_starts(device, dy.shape[0], rows):
            leaves = [Tensor(_part(x, device, first, rows), device, needs) for x, needs in zip(given, ctx.needs_grad)]
            with recomputing():
                made = fn(*leaves)
            run_backward([made], [_part(dy, device, first, rows)])
            for leaf, dx in zip(leaves, grads):
                if dx is not None:
                    device.copy(leaf.gradient, _part(dx, device, first, rows))
            del leaves, leaf, made
    return grads
