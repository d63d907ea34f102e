"""Run a part of the model that treats rows independently in chunks of rows, to save memory for intermediate results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from wgrad.autograd.checkpoint import keeping, keeping_matmuls, results_kept
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
_END: Sequence[Array] = ()  # behind the results of a chunk, which others of the part may follow


def even_rows(rows: int, most: int) -> int:
    """Return the rows of a chunk if `rows` are divided evenly into as few chunks of about `most` as possible."""
    chunks = -(-rows // max(most, ROWS))
    return -(-rows // (chunks * ROWS)) * ROWS


def chunk_rows(rows: int, row_bytes: int, most_bytes: int, above: int) -> int | None:
    """Return the rows of a chunk of about `most_bytes`; None: at most `above` rows, or so many bytes, are no chunks."""
    most = most_bytes // max(row_bytes, 1)
    return even_rows(rows, most) if rows > max(most, above) else None


def in_row_chunks(
    fn: Callable[..., Tensor],
    x: Tensor,
    rows: int,
    *others: Tensor,
    spent: bool = False,
    kept: int = 0,
    staying: int = 0,
) -> Tensor:
    """Return fn(x, *others), computed in chunks of rows. Only the arguments are saved; the backward recomputes fn.

    A frozen weight that the device decodes before its matmuls is decoded once for all chunks, in forward and backward.
    Inside `checkpoint`, this must be the last operation, with an output of x's shape and dtype: a recomputation skips
    that output, because nothing reads it.

    Args:
        fn: Treats each row independently.
        x: [N, C].
        rows: Rows of a chunk, a multiple of 64.
        *others: Further arguments, [N, ...].
        spent: Whether nothing else reads x's memory after this backward, so that x's gradient can replace it.
        kept: Number of chunks, at most two, whose matmul outputs a checkpointed part keeps with its other results of
            `once`. Nothing is kept of other chunks, or outside.
        staying: Number of these chunks, the last ones, whose outputs stay on the device where others are offloaded.

    Returns:
        [N, D].
    """
    results, found = results_kept() if kept else None, list[list[Sequence[Array]]]()
    if is_recomputing():
        result = x.detach()  # in place of the output, whose shape and dtype it has
        if results is not None:
            found = [_taken(results) for _ in range(kept)]
    else:
        found = [[] for _ in range(kept if results is not None else 0)]
        result = Tensor(
            _forward(fn, [x.data, *(other.data for other in others)], x.device, rows, found, staying), x.device
        )
        if results is not None:
            results += [arrays for chunk in found for arrays in (*chunk, _END)]
    if is_recording():
        edges = [edge_of(x), *map(edge_of, others)]
        ctx = Context("in_row_chunks", x.device, edges)
        ctx.save(x.data, *(other.data for other in others))
        ctx.kept = found
        attach(ctx, lambda dy: _backward(fn, ctx, dy, rows, spent), edges, [result])
    return result


def _taken(results: list[Sequence[Array]]) -> list[Sequence[Array]]:
    """Take the results of a chunk from those that the recomputation of the part still has to take."""
    own = []
    while arrays := results.pop(0):
        own.append(arrays)
    return own


def _part(array: Array, device: Device, first: int, rows: int) -> Array:
    columns = array.shape[1]
    return device.view(array, (min(rows, array.shape[0] - first), columns), first * columns)


@contextmanager
def _keeping(kept: Sequence[list[Sequence[Array]]], number: int, staying: int = 0) -> Iterator[None]:
    """Keep the results of `once` of a chunk in its list, or take them from it; keep none of a chunk without a list."""
    own = kept[number] if number < len(kept) else None
    with keeping(own), keeping_matmuls(own is not None, staying=number >= len(kept) - staying):
        yield


def _forward(
    fn: Callable[..., Tensor],
    given: Sequence[Array],
    device: Device,
    rows: int,
    kept: Sequence[list[Sequence[Array]]],
    staying: int,
) -> Array:
    """Return the output. kept: a list for the results of `once` of each of the first chunks. staying: as above."""
    out, count = None, given[0].shape[0]
    with recording(False), device.caching_dequantized():
        for number, first in enumerate(chunk_starts(device, count, rows)):
            with _keeping(kept, number, staying):
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
        for number, first in enumerate(chunk_starts(device, dy.shape[0], rows)):
            leaves = [Tensor(_part(x, device, first, rows), device, needs) for x, needs in zip(given, ctx.needs_grad)]
            with recomputing(), _keeping(ctx.kept, number):
                made = fn(*leaves)
            run_backward([made], [_part(dy, device, first, rows)])
            for leaf, dx in zip(leaves, grads):
                if dx is not None:
                    device.copy(leaf.gradient, _part(dx, device, first, rows))
            del leaves, leaf, made
    return grads
