"""Self-test cases of attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.case import BUILTIN_ULPS, Case, Inputs, Outputs, dtype_name, normal
from wgrad.autograd.selftest.starts import document_starts
from wgrad.device.contract import Device


def attention_case(
    variant: str,
    shape: tuple[int, int, int, int, int],
    t: Any,
    *,
    keys: int = 0,
    cache_len: int = 0,
    window: int = 0,
    softcap: float = 0.0,
    documents: int = 1,
    rising: float = 0.0,
    backward: bool = False,
) -> Case:
    """Return a case of `attention` or its backward.

    Args:
        variant: Name of the case.
        shape: B, T, H, G, D.
        t: Dtype of q, k and v.
        keys: S; 0: T.
        cache_len: Keys before the queries.
        window: Most keys that a query sees; 0: no limit.
        softcap: Limit of the scores; 0: none.
        documents: Documents of a sequence.
        rising: Difference between the scores of the last key and the first.
        backward: Whether this is a case of the backward.
    """
    b, length, h, g, d = shape
    s, scale = keys or length, d**-0.5
    options = {"scale": scale, "window": window, "softcap": softcap}

    def build(rng: np.random.Generator) -> Inputs:
        inputs: Inputs = {
            "q": normal(rng, (b, length, h, d), t),
            "k": normal(rng, (b, s, g, d), t),
            "v": normal(rng, (b, s, g, d), t),
            "doc_start": document_starts(rng, b, length, documents),
            "cache_len": np.array([cache_len], np.int32),
        }
        if rising:
            inputs["q"][..., 0] += 8
            inputs["k"][..., 0] += np.linspace(0, rising / 8 / scale, s).astype(t)[None, :, None]
        if backward:
            o, lse = ReferenceDevice().attention(*inputs.values(), **options)
            inputs |= {"o": o, "lse": lse, "do": normal(rng, o.shape, t)}
        return inputs

    op = "attention_backward" if backward else "attention"
    text, direction = f"{'x'.join(map(str, shape))}" + (f",{s}" if keys else ""), "backward" if backward else "forward"
    name = f"{op}/{variant}/{text}/{dtype_name(t)}"
    call = partial(_backward if backward else _forward, options=options)
    # If a query sees one key, do v - do o cancels to 0 in dq and dk: two sums of D products near 1, times D^-0.5.
    return Case(
        name, op, direction, dtype_name(t), text, build, call, BUILTIN_ULPS, cancels=d**0.5 if backward else 0.0
    )


def _forward(device: Device, x: Inputs, options: dict[str, Any]) -> Outputs:
    o, lse = device.attention(x["q"], x["k"], x["v"], x["doc_start"], x["cache_len"], **options)
    return {"o": o, "lse": lse}


def _backward(device: Device, x: Inputs, options: dict[str, Any]) -> Outputs:
    arguments = (x[n] for n in ("do", "q", "k", "v", "o", "lse", "doc_start"))
    return dict(zip(("dq", "dk", "dv"), device.attention_backward(*arguments, **options)))


def cases(t: np.dtype) -> list[Case]:
    found = []
    for back in (False, True):
        found += [
            attention_case("causal", (1, 37, 2, 2, 64), t, backward=back),
            attention_case("one token", (1, 1, 2, 1, 64), t, backward=back),
            attention_case("grouped", (2, 70, 6, 2, 64), t, backward=back),
            attention_case("one group", (1, 33, 3, 1, 128), t, backward=back),
            attention_case("tiles", (1, 259, 2, 1, 64), t, backward=back),
            attention_case("odd width", (1, 41, 4, 2, 40), t, backward=back),
            attention_case("width 96", (1, 67, 2, 1, 96), t, backward=back),
            attention_case("width 10", (1, 41, 2, 1, 10), t, backward=back),
            attention_case("window", (2, 70, 4, 2, 64), t, window=13, backward=back),
            attention_case("window 1", (1, 37, 2, 2, 40), t, window=1, backward=back),
            attention_case("packed", (2, 133, 4, 2, 64), t, documents=5, backward=back),
            attention_case("packed window", (2, 133, 4, 2, 40), t, documents=3, window=29, backward=back),
            attention_case("softcap", (2, 70, 4, 2, 64), t, softcap=1.5, backward=back),
            attention_case("softcap window", (2, 133, 4, 2, 40), t, documents=3, window=29, softcap=0.8, backward=back),
        ]
    return found + [
        attention_case("decode", (2, 1, 4, 2, 64), t, keys=53, cache_len=41),
        attention_case("decode long", (1, 1, 6, 2, 64), t, keys=1003, cache_len=1002),
        attention_case("decode first", (1, 1, 4, 2, 40), t, keys=64, cache_len=0),
        attention_case("decode window", (1, 1, 4, 1, 128), t, keys=130, cache_len=100, window=17),
        attention_case("decode softcap", (1, 1, 4, 2, 64), t, keys=130, cache_len=100, window=70, softcap=1.5),
        attention_case("prefill on a cache", (1, 19, 4, 2, 64), t, keys=130, cache_len=70),
    ]
