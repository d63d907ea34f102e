"""Bench entries of mixture of experts, with uniformly random choices."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from wgrad.autograd.bench.entry import F32, Entry, Sizes, entry, normal
from wgrad.device.contract import Array, Device


def entries(sizes: Sizes, dtype: np.dtype) -> list[Entry]:
    experts, chosen, width, hidden = sizes.experts
    tokens = sizes.tokens

    def logits(device: Device) -> Array:
        return normal(device, (tokens, experts), dtype)

    def combine(device: Device) -> dict[str, Any]:
        _, _, place = _groups(device, sizes)
        weights = normal(device, (tokens, chosen), F32, 1)
        return {"y": normal(device, (tokens * chosen, hidden), dtype), "place": place, "weights": weights}

    def combine_backward(device: Device) -> dict[str, Any]:
        _, order, _ = _groups(device, sizes)
        made = {"dsum": normal(device, (tokens, hidden), dtype), "y": normal(device, (tokens * chosen, hidden), dtype)}
        return {**made, "order": order, "weights": normal(device, (tokens, chosen), F32, 1)}

    def route_backward(device: Device) -> dict[str, Any]:
        given = {"dweights": normal(device, (tokens, chosen), F32, 1), "logits": logits(device)}
        return {**given, "ids": _ids(device, sizes), "normalize": True}

    routed, back = (tokens, experts, chosen), (tokens, chosen, hidden)
    found = [
        entry("route", routed, dtype, lambda d: {"logits": logits(d), "chosen": chosen, "normalize": True}),
        entry("route_backward", routed, dtype, route_backward),
        entry("combine", back, dtype, combine),
        entry("combine_backward", back, dtype, combine_backward),
        *_slots(sizes, dtype),
        *_grouped(sizes, dtype),
    ]
    if dtype == F32:
        found.append(entry("group_by_expert", routed, np.int32, lambda d: {"ids": _ids(d, sizes), "experts": experts}))
    return found


def _ids(device: Device, sizes: Sizes) -> Array:
    experts, chosen, _, _ = sizes.experts
    random = np.random.default_rng(0).random((sizes.tokens, experts))
    return device.upload(np.ascontiguousarray(np.argsort(random, axis=1)[:, :chosen].astype(np.int32)))


def _groups(device: Device, sizes: Sizes) -> tuple[Array, Array, Array]:
    start, order, place = device.group_by_expert(_ids(device, sizes), sizes.experts[0])
    return start, order, place


def _slots(sizes: Sizes, dtype: np.dtype) -> list[Entry]:
    """Return the entries of experts kept in slots: finding, keeping and copying them."""
    experts, chosen, width, hidden = sizes.experts

    def state(device: Device, slots: int) -> dict[str, Array]:
        sizes = {"used": slots, "counts": 3}
        held = device.upload(np.arange(slots, dtype=np.int32))
        return {"held": held} | {name: device.zeros((size,), np.int32) for name, size in sizes.items()}

    def place(device: Device) -> dict[str, Any]:
        ids = np.arange(0, experts, max(experts // chosen, 1), dtype=np.int32)[None, :chosen]
        slots = state(device, max(experts // 2, ids.size))
        return {"ids": device.upload(np.ascontiguousarray(ids)), **slots, "experts": experts}

    def keep(device: Device) -> dict[str, Any]:
        return {"start": _groups(device, sizes)[0], **state(device, max(experts // 2, 1)), "counted": True}

    def copy(device: Device) -> dict[str, Any]:  # all of them, to the same places
        pairs = np.repeat(np.arange(experts, dtype=np.int32), 2).reshape(experts, 2)
        arrays = {name: normal(device, (experts * hidden, width), dtype) for name in ("source", "out")}
        return {"copies": device.upload(pairs), **arrays, "experts": experts, "slots": experts}

    def gather(device: Device) -> dict[str, Any]:  # half of them from slots
        slots, numbers = max(experts // 2, 1), np.arange(experts, dtype=np.int32)
        origins = np.stack([np.where(numbers < slots, numbers, -1), np.full(experts, -1)], axis=1)
        parts = {"source": experts, "kept": slots, "out": experts}
        arrays = {name: normal(device, (count * hidden, width), dtype) for name, count in parts.items()}
        return {"origins": device.upload(origins.astype(np.int32)), **arrays, "slots": slots}

    found = [
        entry("copy_experts", (experts, hidden, width), dtype, copy),
        entry("gather_experts", (experts, hidden, width), dtype, gather),
    ]
    if dtype == F32:
        found.append(entry("place_experts", (1, experts, chosen), np.int32, place))
        found.append(entry("keep_experts", (sizes.tokens, experts, chosen), np.int32, keep))
    return found


def _grouped(sizes: Sizes, t: np.dtype) -> list[Entry]:
    experts, chosen, width, hidden = sizes.experts
    rows, n = sizes.tokens * chosen, 2 * width

    def weight(device: Device, kind: str) -> Any:
        if kind != "nf4":
            return normal(device, (experts, n, hidden), t, 1)
        return device.quantize(normal(device, (experts * n, hidden), F32, 1), 64)

    def forward(device: Device, kind: str) -> dict[str, Any]:
        start, order, _ = _groups(device, sizes)
        x = normal(device, (sizes.tokens, hidden), t)
        return {"x": x, "weight": weight(device, kind), "start": start, "order": order}

    def backward(device: Device, kind: str) -> dict[str, Any]:
        start, _, _ = _groups(device, sizes)
        return {"dy": normal(device, (rows, n), t), "weight": weight(device, kind), "start": start}

    def weight_grad(device: Device) -> dict[str, Any]:
        start, order, _ = _groups(device, sizes)
        return {
            "dy": normal(device, (rows, 16), F32),
            "x": normal(device, (sizes.tokens, hidden), t),
            "start": start,
            "order": order,
        }

    shape = (rows, experts, n, hidden)
    found = [entry("grouped_weight_grad", (rows, experts, 16, hidden), t, weight_grad)]
    for kind in ("dense", "nf4"):
        found.append(entry("grouped_linear", shape, t, partial(forward, kind=kind), kind))
        found.append(entry("grouped_linear_backward", shape, t, partial(backward, kind=kind), kind))
    return found
