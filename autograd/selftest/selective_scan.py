"""Self-test cases of Mamba-1's recurrence."""

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
        found.append(scan_case("packed", (2, 133, 21, 5), t, back, documents=9))
        if t == F32:
            found += [
                scan_case("one token", (1, 1, 1, 1), t, back),
                scan_case("segments", (17, 70, 18, 16), t, back, documents=3),
                scan_case("wide", (1, 70, 6, 37), t, back),
                scan_case("strong decay", (1, 130, 3, 8), t, back, rate=4.0),
            ]
    if t == F32:
        found += [
            scan_case("from a state", (2, 150, 33, 16), t, False, cache_len=9),
            scan_case("steps on a state", (2, 3, 18, 6), t, False, cache_len=9),
        ]
    return [*found, scan_case("a step on a state", (2, 1, 40, 16), t, False, cache_len=9)]


def scan_case(
    variant: str,
    shape: tuple[int, int, int, int],
    t: Any,
    back: bool,
    *,
    documents: int = 1,
    rate: float = 0.0,
    cache_len: int = 0,
) -> Case:
    """Return a case of a batch of tokens, channels and states of a channel. rate: mean of A_log.

    With cache_len, it continues from a state, and in the first sequence a document begins within the tokens.
    """
    batch, tokens, channels, numbers = shape

    def build(rng: np.random.Generator) -> Inputs:
        starts = document_starts(rng, batch, tokens, documents)
        starts[-1, 0] = min(tokens - 1, 1)  # a first token before its document
        if cache_len:
            starts[0] = cache_len + np.where(np.arange(tokens) < tokens // 2, -1, tokens // 2)
            starts[1] = np.maximum(starts[1], cache_len + min(tokens - 1, 1))
        weight = normal(rng, (channels, numbers + 2))
        weight += np.array([*[rate] * numbers, 1, -2], np.float32)
        inputs: Inputs = {
            "x": normal(rng, (batch, tokens, channels), t),
            "dt": normal(rng, (batch, tokens, channels), t),
            "bc": normal(rng, (batch, tokens, 2 * numbers), t),
            "weight": weight,
            "doc_start": starts,
            "cache_len": np.array([cache_len], np.int32),
        }
        if cache_len:
            inputs["state"] = normal(rng, (batch, channels, numbers))
        if back:
            inputs["states"] = ReferenceDevice().selective_scan(**inputs)[1]
            inputs["dy"] = normal(rng, (batch, tokens, channels), t)
        return inputs

    def forward(device: Device, x: Inputs) -> Outputs:
        y, _ = device.selective_scan(**x)
        return {"y": y, **({"state": x["state"]} if cache_len else {})}

    def backward(device: Device, x: Inputs) -> Outputs:
        return dict(zip(("dx", "ddt", "dbc", "dweight"), device.selective_scan_backward(**x)))

    op, text = "selective_scan_backward" if back else "selective_scan", "x".join(map(str, shape))
    direction, call = ("backward", backward) if back else ("forward", forward)
    name = f"{op}/{variant}/{text}/{dtype_name(t)}"
    return Case(name, op, direction, dtype_name(t), text, build, call, BUILTIN_ULPS, cancels=1.0)
