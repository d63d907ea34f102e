"""Self-test cases of the cache of experts in slots."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.selftest.case import F32, Case, Inputs, Outputs, dtype_name, normal
from wgrad.autograd.selftest.experts import some_ids
from wgrad.device.contract import Device


def cases(t: np.dtype) -> list[Case]:
    found = [_copy("words", 7, 4, 37, t), _copy("vectors", 5, 5, 6016, t)]
    if t != F32:
        return found
    return [*found, _place(1, 9, 2, 5), _place(3, 23, 4, 13), _place(1, 3, 3, 3), _place(70, 300, 4, 290)]


def _place(tokens: int, experts: int, chosen: int, slots: int) -> Case:
    """Return a case of two calls, from slots of which every third is empty."""

    def build(rng: np.random.Generator) -> Inputs:
        held = rng.permutation(experts)[:slots].astype(np.int32)
        held[::3] = -1
        used = np.where(held < 0, 0, rng.integers(1, 4, slots)).astype(np.int32)
        made: Inputs = {"held": held, "used": used, "counts": np.array([4, 9, 5], np.int32)}
        return made | {name: some_ids(rng, tokens, experts, chosen) for name in ("ids", "more")}

    def call(device: Device, x: Inputs) -> Outputs:
        cache, made = [x[name] for name in ("held", "used", "counts")], {}
        for name in ("ids", "more"):
            made[f"places of {name}"], made[f"copies of {name}"] = device.place_experts(x[name], *cache, experts)
        return {**made, **dict(zip(("held", "used", "counts"), cache))}

    shape = f"{tokens}x{experts}x{chosen}x{slots}"
    return Case(f"place_experts/{shape}", "place_experts", "forward", "int32", shape, build, call)


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
