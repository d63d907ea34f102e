"""Self-test cases of the gradients of LoRA's factors under a stack of weights."""

from __future__ import annotations

import numpy as np

from wgrad.autograd.selftest.case import Case, Inputs, Outputs, dtype_name, normal
from wgrad.device.contract import Device

SHAPES = ((131, (192, 64, 128), 8), (37, (64, 128), 5), (48, (64, 64, 64), 70))  # rows, parts, rank
UNITS = ((48, (64, 128), 5),)  # sizes that tensor cores take whole


def cases(t: np.dtype, shapes: tuple[tuple[int, tuple[int, ...], int], ...] = SHAPES) -> list[Case]:
    found = []
    for m, parts, rank in shapes:

        def build(rng: np.random.Generator, m: int = m, parts: tuple[int, ...] = parts, rank: int = rank) -> Inputs:
            inputs: Inputs = {"dy": normal(rng, (m, sum(parts)), t), "b": normal(rng, (sum(parts), rank))}
            inputs["u"] = normal(rng, (m, len(parts) * rank))
            return {**inputs, "out": normal(rng, (sum(parts), rank))}

        def du(device: Device, x: Inputs, parts: tuple[int, ...] = parts) -> Outputs:
            return {"du": device.lora_du(x["dy"], x["b"], parts, alpha=0.37)}

        def db(device: Device, x: Inputs, parts: tuple[int, ...] = parts) -> Outputs:
            added = device.lora_db(x["dy"], x["u"], parts, out=x["out"], accumulate=True)
            return {"db": device.lora_db(x["dy"], x["u"], parts), "added": added}

        shape, name, stack = f"{m}x{sum(parts)}x{rank}", dtype_name(t), f"stack of {len(parts)}"
        found.append(Case(f"lora_du/{stack}/{shape}/{name}", "lora_du", "backward", name, shape, build, du))
        found.append(Case(f"lora_db/{stack}/{shape}/{name}", "lora_db", "backward", name, shape, build, db))
    return found
