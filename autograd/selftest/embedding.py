"""Self-test cases of embedding."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.selftest.case import BF16, F16, F32, Case, Inputs, Outputs, dtype_name, normal
from wgrad.device.contract import Device


def cases(t: np.dtype) -> list[Case]:
    vocab, width, count = 71, 37, 123
    shape, name = f"{vocab}x{width},{count}", dtype_name(t)

    def build(table_dtype: Any) -> Any:
        def build_inputs(rng: np.random.Generator) -> Inputs:
            ids = rng.integers(0, vocab, count).astype(np.int32)
            ids[:2] = (0, vocab - 1)
            table = normal(rng, (vocab, width), table_dtype)
            return {"table": table, "ids": ids, "dy": normal(rng, (count, width), t)}

        return build_inputs

    def forward(device: Device, x: Inputs) -> Outputs:
        return {"y": device.embedding(x["table"], x["ids"], dtype=t)}

    def default(device: Device, x: Inputs) -> Outputs:
        return {"y": device.embedding(x["table"], x["ids"])}

    def backward(device: Device, x: Inputs) -> Outputs:
        return {"dtable": device.embedding_backward(x["dy"], x["ids"], vocab)}

    found = [
        Case(f"embedding/{dtype_name(d)} table/{shape}/{name}", "embedding", "forward", name, shape, build(d), forward)
        for d in (F32, F16, BF16)
        if t == F16 or d != F16
    ]
    for d in (F32, BF16) if t == F32 else (F16,):
        label = f"embedding/default dtype, {dtype_name(d)} table/{shape}/{name}"
        found.append(Case(label, "embedding", "forward", name, shape, build(d), default))
    more = Case(
        f"embedding_backward/{shape}/{name}", "embedding_backward", "backward", name, shape, build(F32), backward
    )
    return [*found, more]
