"""Self-test cases of the gradients of LoRA's factors under a stack of weights."""

from __future__ import annotations

from functools import partial

import numpy as np

from wgrad.autograd.selftest.case import Case, Inputs, Outputs, dtype_name, normal
from wgrad.device.contract import Device

SHAPES = ((131, (192, 64, 128), 8), (37, (64, 128), 5), (48, (64, 64, 64), 70))  # rows, parts, rank
BOTH = ((37, (64, 128), 5), (48, (72,), 8))
BOTH_UNITS = ((75, (64, 192, 64), 12), (270, (208,), 16), (16, (64,), 4))  # rank, rows and columns divide no tile
UNITS = ((48, (64, 128), 5),)  # sizes that tensor cores take whole


def _inputs(m: int, parts: tuple[int, ...], rank: int, t: np.dtype, rng: np.random.Generator) -> Inputs:
    inputs: Inputs = {"dy": normal(rng, (m, sum(parts)), t), "b": normal(rng, (sum(parts), rank))}
    inputs["u"] = normal(rng, (m, len(parts) * rank))
    return {**inputs, "out": normal(rng, (sum(parts), rank))}


def cases(t: np.dtype, shapes: tuple[tuple[int, tuple[int, ...], int], ...] = SHAPES) -> list[Case]:
    found = []
    for m, parts, rank in shapes:
        build = partial(_inputs, m, parts, rank, t)

        def du(device: Device, x: Inputs, parts: tuple[int, ...] = parts) -> Outputs:
            return {"du": device.lora_du(x["dy"], x["b"], parts, alpha=0.37)}

        def db(device: Device, x: Inputs, parts: tuple[int, ...] = parts) -> Outputs:
            added = device.lora_db(x["dy"], x["u"], parts, out=x["out"], accumulate=True)
            return {"db": device.lora_db(x["dy"], x["u"], parts), "added": added}

        shape, name, stack = f"{m}x{sum(parts)}x{rank}", dtype_name(t), f"stack of {len(parts)}"
        found.append(Case(f"lora_du/{stack}/{shape}/{name}", "lora_du", "backward", name, shape, build, du))
        found.append(Case(f"lora_db/{stack}/{shape}/{name}", "lora_db", "backward", name, shape, build, db))
    return found + (cases_of_both(t) if shapes is SHAPES else [])


def cases_of_both(t: np.dtype, shapes: tuple[tuple[int, tuple[int, ...], int], ...] = BOTH) -> list[Case]:
    """Return cases of `lora_grads`; one part is a weight that is no stack."""
    found = []
    for m, parts, rank in shapes:
        build = partial(_inputs, m, parts, rank, t)

        def grads(device: Device, x: Inputs, parts: tuple[int, ...] = parts) -> Outputs:
            given = x["dy"], x["b"], x["u"], parts if len(parts) > 1 else ()
            made, added = device.lora_grads(*given, alpha=0.37, out=x["out"], accumulate=True)
            return {"du": made, "added": added, "db": device.lora_grads(*given)[1]}

        shape, name, stack = f"{m}x{sum(parts)}x{rank}", dtype_name(t), f"stack of {len(parts)}"
        found.append(Case(f"lora_grads/{stack}/{shape}/{name}", "lora_grads", "backward", name, shape, build, grads))
    return found
