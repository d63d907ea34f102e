"""Self-test cases of Mamba-2's recurrence."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.case import BUILTIN_ULPS, F32, Case, Inputs, Outputs, dtype_name, normal
from wgrad.autograd.selftest.starts import document_starts
from wgrad.device.contract import Device


def cases(t: np.dtype) -> list[Case]:
    found = []
    for back in (False, True):
        found.append(_case("packed", (2, 133, 1, 2, 10, 6), t, back, documents=9))
        if t == F32:
            found += [
                _case("one token", (1, 1, 1, 1, 4, 4), t, back),
                _case("chunks", (1, 150, 2, 4, 16, 20), t, back),
                _case("wide", (1, 70, 1, 1, 72, 68), t, back),
                _case("strong decay", (1, 130, 1, 1, 8, 8), t, back, decay=30.0),
            ]
    if t == F32:
        found += [
            _case("from a state", (2, 70, 1, 2, 10, 6), t, False, cache_len=9),
            _case("steps on a state", (2, 3, 2, 4, 6, 70), t, False, cache_len=9),
        ]
    return [*found, _case("a step on a state", (2, 1, 2, 4, 12, 10), t, False, cache_len=9)]


def _case(
    variant: str,
    shape: tuple[int, int, int, int, int, int],
    t: Any,
    back: bool,
    *,
    documents: int = 1,
    cache_len: int = 0,
    decay: float = 0.2,
) -> Case:
    """Return a case of the recurrence. shape: batch, tokens, groups, heads, widths of B and of heads.

    With cache_len, it continues from a state. In the first sequence a document begins within the tokens, and the others
    have a token before their document.
    """
    batch, tokens, groups, heads, wide, width = shape
    options = {"groups": groups, "state_dim": wide}

    def build(rng: np.random.Generator) -> Inputs:
        starts = document_starts(rng, batch, tokens, documents)
        if cache_len:
            starts[0] = cache_len + np.where(np.arange(tokens) < tokens // 2, -1, tokens // 2)
            starts[1] = np.maximum(starts[1], cache_len + min(tokens - 1, 1))  # a first token before its document
        inputs: Inputs = {
            "xbc": normal(rng, (batch, tokens, heads * width + 2 * groups * wide), t, scale=0.5),
            "g": (-decay * rng.random((batch, tokens, heads))).astype(np.float32),
            "dt": rng.random((batch, tokens, heads)).astype(np.float32),
            "skip": normal(rng, (heads,)),
            "doc_start": starts,
            "cache_len": np.array([cache_len], np.int32),
        }
        if cache_len:
            inputs["state"] = normal(rng, (batch, heads, wide, width))
        if back:
            inputs["states"] = ReferenceDevice().ssd(**inputs, **options)[1]
            inputs["dy"] = normal(rng, (batch, tokens, heads, width), t)
        return inputs

    def forward(device: Device, x: Inputs) -> Outputs:
        y, _ = device.ssd(**x, **options)
        return {"y": y, **({"state": x["state"]} if cache_len else {})}

    def backward(device: Device, x: Inputs) -> Outputs:
        return dict(zip(("dxbc", "dg", "ddt", "dskip"), device.ssd_backward(**x, **options)))

    op, text = "ssd_backward" if back else "ssd", "x".join(map(str, shape))
    direction, call = ("backward", backward) if back else ("forward", forward)
    name = f"{op}/{variant}/{text}/{dtype_name(t)}"
    return Case(name, op, direction, dtype_name(t), text, build, call, BUILTIN_ULPS, cancels=1.0)
