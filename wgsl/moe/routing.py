"""A mixture of experts without its GEMMs: routing, grouping slots by expert, combining. Shaders: moe_*.wgsl."""

from __future__ import annotations

import numpy as np

from wgrad.device.memory import Array
from wgrad.wgsl.elements import GROUP, compute_type, vector_width, wgsl_type
from wgrad.wgsl.operators import implements
from wgrad.wgsl.runtime.compile import Constant
from wgrad.wgsl.runtime.runtime import Runtime

MOST_EXPERTS, _MOST_CHOSEN = 1024, 64  # that fit into workgroup memory


@implements("route")
def route(device: Runtime, logits: Array, chosen: int, normalize: bool, by: Array | None) -> tuple[Array, Array]:
    tokens = logits.shape[0]
    weights, ids = device.empty((tokens, chosen)), device.empty((tokens, chosen), np.int32)
    switches = {"BACKWARD": False, "NORMALIZE": normalize, "CHOSEN_BY": by is not None}
    _route(device, [logits, weights, ids, by], logits, chosen, **switches)
    return weights, ids


@implements("route_backward")
def route_backward(device: Runtime, dweights: Array, logits: Array, ids: Array, normalize: bool) -> Array:
    out = device.empty(logits.shape, logits.dtype)
    switches = {"BACKWARD": True, "NORMALIZE": normalize, "CHOSEN_BY": False}
    _route(device, [logits, dweights, ids, out], logits, ids.shape[1], **switches)
    return out


def _route(device: Runtime, arrays: list[Array | None], logits: Array, chosen: int, **switches: bool) -> None:
    tokens, experts = logits.shape
    constants: dict[str, Constant] = {"X_T": wgsl_type(logits.dtype), "MOST_CHOSEN": _MOST_CHOSEN, **switches}
    work = 4.0 * tokens * experts * (chosen + 3)
    device.launch("moe_route", arrays, [tokens, experts, chosen], device.groups(tokens, 1), constants, work=work)


@implements("group_by_expert")
def group_by_expert(device: Runtime, ids: Array, experts: int) -> tuple[Array, Array, Array]:
    slots = ids.size
    chunks = -(-slots // GROUP)
    counts = device.empty((chunks, experts), np.uint32)
    start, order = device.empty((experts + 1,), np.int32), device.empty((slots,), np.int32)
    place = device.empty(ids.shape, np.int32)
    constants: dict[str, Constant] = {"MOST_EXPERTS": MOST_EXPERTS}
    arrays, params = [ids, counts, start, order, place], [slots, experts, chunks]
    works = {"count": float(slots * experts), "scan": float(chunks * experts), "scatter": 128.0 * slots}
    for entry, work in works.items():
        groups = (1, 1, 1) if entry == "scan" else device.groups(chunks, 1)
        device.launch("moe_group", arrays, params, groups, constants, entry=entry, work=work)
    return start, order, place


@implements("combine")
def combine(
    device: Runtime, y: Array, place: Array, weights: Array | None, residual: Array | None, dtype: np.dtype
) -> Array:
    tokens, chosen = place.shape
    out = device.empty((tokens, y.shape[1]), dtype)
    vec = vector_width(y.shape[1])
    constants = _types(vec, y, out) | {"BACKWARD": False, "WEIGHTED": weights is not None}
    constants |= {
        "HAS_RESIDUAL": residual is not None,
        "R_T": wgsl_type((out if residual is None else residual).dtype, vec),
    }
    columns = y.shape[1] // vec
    groups, work = device.groups(tokens * columns, GROUP), 2.0 * y.nbytes
    arrays, params = [y, place, weights, residual, out], [tokens, columns, chosen]
    device.launch("moe_combine", arrays, params, groups, constants, work=work)
    return out


@implements("combine_backward")
def combine_backward(device: Runtime, dsum: Array, y: Array, order: Array, weights: Array) -> tuple[Array, Array]:
    dy, dweights = device.empty(y.shape, y.dtype), device.empty(weights.shape)
    vec = vector_width(y.shape[1])
    constants = _types(vec, y, dsum) | {"BACKWARD": True}
    rows, columns = y.shape[0], y.shape[1] // vec
    arrays, params = [dsum, y, order, weights, dy, dweights], [rows, columns, weights.shape[1]]
    device.launch("moe_combine", arrays, params, device.groups(rows, 1), constants, work=4.0 * y.nbytes)
    return dy, dweights


def _types(vec: int, y: Array, out: Array) -> dict[str, Constant]:
    types = {"Y_T": wgsl_type(y.dtype, vec), "OUT_T": wgsl_type(out.dtype, vec)}
    return {"VEC": vec, "C_T": compute_type(vec), **types}
