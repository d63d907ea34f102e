"""Self-test cases of the cache of experts in slots."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.selftest.case import F32, Case, Inputs, Outputs, dtype_name, normal
from wgrad.autograd.selftest.experts import some_ids
from wgrad.device.contract import Device


def cases(t: np.dtype) -> list[Case]:
    found = [_copy("words", 7, 4, 37, t), _copy("vectors", 5, 5, 6016, t)]
    found += [_gather("words", 7, 4, 37, t), _gather("vectors", 5, 3, 6016, t), _gather("slots alone", 6, 5, 1028, t)]
    if t != F32:
        return found
    found += [_place(1, 9, 2, 5), _place(3, 23, 4, 13), _place(1, 3, 3, 3), _place(70, 300, 4, 290)]
    return [*found, _keep(5, 9, 2, 4), _keep(1, 23, 4, 13), _keep(7, 3, 3, 3), _keep(200, 300, 4, 270)]


def _place(tokens: int, experts: int, chosen: int, slots: int) -> Case:
    """Return a case of two calls, from slots of which every third is empty."""

    def build(rng: np.random.Generator) -> Inputs:
        return _cache(rng, experts, slots) | {n: some_ids(rng, tokens, experts, chosen) for n in ("ids", "more")}

    def call(device: Device, x: Inputs) -> Outputs:
        cache, made = [x[name] for name in ("held", "used", "counts")], {}
        for name in ("ids", "more"):
            made[f"places of {name}"], made[f"copies of {name}"] = device.place_experts(x[name], *cache, experts)
        return {**made, **dict(zip(("held", "used", "counts"), cache))}

    shape = f"{tokens}x{experts}x{chosen}x{slots}"
    return Case(f"place_experts/{shape}", "place_experts", "forward", "int32", shape, build, call)


def _cache(rng: np.random.Generator, experts: int, slots: int) -> Inputs:
    """Return the arrays of a cache in which every third slot is empty."""
    held = rng.permutation(experts)[:slots].astype(np.int32)
    held[::3] = -1
    used = np.where(held < 0, 0, rng.integers(1, 4, slots)).astype(np.int32)
    return {"held": held, "used": used, "counts": np.array([4, 9, 5], np.int32)}


def _keep(tokens: int, experts: int, chosen: int, slots: int) -> Case:
    """Return a case of two calls, the first of which is not counted."""

    def build(rng: np.random.Generator) -> Inputs:
        bounds = []
        for _ in range(2):
            rows = np.bincount(some_ids(rng, tokens, experts, chosen).reshape(-1), minlength=experts)
            bounds.append(np.concatenate([[0], np.cumsum(rows)]).astype(np.int32))
        return _cache(rng, experts, slots) | {"start": bounds[0], "more": bounds[1]}

    def call(device: Device, x: Inputs) -> Outputs:
        cache = [x[name] for name in ("held", "used", "counts")]
        made: Outputs = {}
        for name in ("start", "more"):
            made[f"origins of {name}"] = device.keep_experts(x[name], *cache, counted=name == "more")
        return {**made, **dict(zip(("held", "used", "counts"), cache))}

    shape = f"{tokens}x{experts}x{chosen}x{slots}"
    return Case(f"keep_experts/{shape}", "keep_experts", "forward", "int32", shape, build, call)


def _gather(variant: str, experts: int, slots: int, words: int, t: Any) -> Case:
    """Return a case of gathering two experts from a slot and from main memory, and two that enter a slot."""

    def build(rng: np.random.Generator) -> Inputs:
        numbers = words * 4 // np.dtype(t).itemsize
        origins = np.array([(-2, -1)] * experts, np.int32)
        origins[[0, 1, 2, experts - 1]] = [(1, -1), (-1, 2), (-1, -1), (-1, 0)]
        of = {"source": experts, "kept": slots, "out": experts}
        return {"origins": origins} | {name: normal(rng, (parts, numbers), t) for name, parts in of.items()}

    def call(device: Device, x: Inputs) -> Outputs:
        out = None if variant == "slots alone" else x["out"]
        device.gather_experts(x["origins"], x["source"], x["kept"], slots, out)
        return {"kept": x["kept"], "out": x["out"]}

    shape = f"{experts}x{slots}x{words}"
    name = f"gather_experts/{variant}/{shape}/{dtype_name(t)}"
    return Case(name, "gather_experts", "forward", dtype_name(t), shape, build, call)


def _copy(variant: str, experts: int, slots: int, words: int, t: Any) -> Case:
    """Return a case of copying experts of so many words of 4 bytes to some of the slots."""

    def build(rng: np.random.Generator) -> Inputs:
        numbers = words * 4 // np.dtype(t).itemsize
        pairs = [(experts - 1, 1), (0, slots - 1), (-1, 2)]  # the last is left out
        return {
            "copies": np.array(pairs, np.int32),
            "source": normal(rng, (experts * numbers,), t),
            "out": normal(rng, (slots, numbers), t),
        }

    def call(device: Device, x: Inputs) -> Outputs:
        device.copy_experts(x["copies"], x["source"], x["out"], experts, slots)
        return {"out": x["out"]}

    shape = f"{experts}x{slots}x{words}"
    name = f"copy_experts/{variant}/{shape}/{dtype_name(t)}"
    return Case(name, "copy_experts", "forward", dtype_name(t), shape, build, call)
