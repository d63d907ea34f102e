"""A mixture of experts without its GEMMs: router, sorting by expert, combining by token. Kernels: moe.hip."""

from __future__ import annotations

import numpy as np

from wgrad.device.memory import Array
from wgrad.hip.elements import GROUP, PER, implements, type_code, type_codes
from wgrad.hip.runtime.runtime import Runtime


@implements("route")
def route(device: Runtime, logits: Array, chosen: int, normalize: bool, by: Array | None) -> tuple[Array, Array]:
    tokens, experts = logits.shape
    weights, ids = device.empty((tokens, chosen)), device.empty((tokens, chosen), np.int32)
    arguments = [logits, weights, ids, by, tokens, experts, chosen, int(normalize), type_code(logits.dtype)]
    work = 4.0 * tokens * experts * (chosen + 3)
    device.launch("moe", "moe_route", arguments, _waves(device, tokens), work=work)
    return weights, ids


@implements("route_backward")
def route_backward(device: Runtime, dweights: Array, logits: Array, ids: Array, normalize: bool) -> Array:
    (tokens, experts), chosen = logits.shape, ids.shape[1]
    out = device.empty(logits.shape, logits.dtype)
    arguments = [logits, dweights, ids, out, tokens, experts, chosen, int(normalize), type_code(logits.dtype)]
    work = 4.0 * tokens * experts * (chosen + 3)
    device.launch("moe", "moe_route_backward", arguments, _waves(device, tokens), work=work)
    return out


@implements("group_by_expert")
def group_by_expert(device: Runtime, ids: Array, experts: int) -> tuple[Array, Array, Array]:
    slots = ids.size
    chunks = -(-slots // GROUP)
    counts, totals = device.empty((experts, chunks), np.uint32), device.empty((experts,), np.uint32)
    start, order = device.empty((experts + 1,), np.int32), device.empty((slots,), np.int32)
    place = device.empty(ids.shape, np.int32)
    sizes, work = [slots, experts, chunks], float(GROUP * slots)
    device.launch("moe", "moe_count", [ids, counts, *sizes], (chunks, 1, 1), work=work)
    device.launch("moe", "moe_scan", [counts, totals, chunks], (experts, 1, 1), work=2 * counts.nbytes)
    device.launch("moe", "moe_scatter", [ids, counts, totals, start, order, place, *sizes], (chunks, 1, 1), work=work)
    return start, order, place


def take_rows(device: Runtime, x: Array, order: Array) -> Array:
    """Return rows of tokens in the order of their experts."""
    slots, columns = order.size, x.shape[1]
    out = device.empty((slots, columns), x.dtype)
    arguments = [x, order, out, slots, columns, slots // x.shape[0], type_code(x.dtype)]
    device.launch("moe", "moe_take", arguments, _eights(device, slots, columns), work=2 * out.nbytes)
    return out


@implements("combine")
def combine(
    device: Runtime, y: Array, place: Array, weights: Array | None, residual: Array | None, dtype: np.dtype
) -> Array:
    (tokens, chosen), columns = place.shape, y.shape[1]
    out = device.empty((tokens, columns), dtype)
    arguments = [y, place, weights, residual, out, tokens, columns, chosen, type_codes(y, residual, out)]
    device.launch("moe", "moe_combine", arguments, _eights(device, tokens, columns), work=2 * y.nbytes)
    return out


@implements("combine_backward")
def combine_backward(device: Runtime, dsum: Array, y: Array, order: Array, weights: Array) -> tuple[Array, Array]:
    dy, dweights = device.empty(y.shape, y.dtype), device.empty(weights.shape)
    rows, columns = y.shape
    arguments = [dsum, y, order, weights, dy, dweights, rows, columns, weights.shape[1], type_codes(dsum, y)]
    device.launch("moe", "moe_combine_backward", arguments, _waves(device, rows), work=4 * y.nbytes)
    return dy, dweights


def _waves(device: Runtime, rows: int) -> tuple[int, int, int]:
    """Return the grid for one wave per row."""
    return device.groups(rows, GROUP // device.wave)


def _eights(device: Runtime, rows: int, columns: int) -> tuple[int, int, int]:
    """Return the grid for eight elements of a row per work-item."""
    return device.groups(rows * -(-columns // PER), GROUP)
