"""Self-test cases of the gated delta rule and of its short convolution."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.reference import ReferenceDevice
from wgrad.autograd.selftest.case import BUILTIN_ULPS, F16, F32, Case, Inputs, Outputs, dtype_name, normal
from wgrad.autograd.selftest.starts import document_starts
from wgrad.device.contract import Device


def cases(t: np.dtype) -> list[Case]:
    found = []
    for back in (False, True):
        found += [
            _conv("packed", (2, 133, 133, 12), t, back, documents=9),
            _conv("without SiLU", (2, 37, 39, 6), t, back, documents=3, silu=False),
            _rule("packed", (2, 133, 1, 2, 10, 6), t, back, documents=9),
        ]
        if t == F32:
            found += [
                _conv("short", (1, 2, 2, 5), t, back),
                _conv("with what came before", (2, 5, 8, 6), t, back, cache_len=3),
                _rule("one token", (1, 1, 1, 1, 4, 4), t, back),
                _rule("chunks", (1, 150, 2, 4, 16, 20), t, back),
                _rule("wide", (1, 70, 1, 1, 72, 68), t, back),
                _rule("strong decay", (1, 130, 1, 1, 8, 8), t, back, decay=30.0),
            ]
    if t == F32:
        found += [
            _rule("from a state", (2, 70, 1, 2, 10, 6), t, False, cache_len=9),
            _rule("steps on a state", (2, 3, 2, 4, 6, 70), t, False, cache_len=9),
        ]
    return [*found, _rule("a step on a state", (2, 1, 2, 4, 12, 10), t, False, cache_len=9)]


def matrix_rule_cases() -> list[Case]:
    """Return cases of widths that tensor cores take.

    They round operands to float16, so float32 gradients of gates may also be off by three units of float16.
    """
    shapes = ((1, 214, 1, 2, 64, 64), (1, 70, 1, 1, 128, 128))
    limit = 3 * float(np.finfo(np.float16).eps / np.finfo(np.float32).eps)
    more: dict[str, Any] = {"decay": 0.03, "ulps": limit}  # much of the state is left at the end of a chunk
    found = [_rule("matrix", shape, F16, back, documents=2, **more) for shape in shapes for back in (False, True)]
    return [*found, _rule("matrix from a state", (2, 70, 1, 2, 64, 64), F16, False, cache_len=9, **more)]


def _conv(
    variant: str,
    shape: tuple[int, int, int, int],
    t: Any,
    back: bool,
    *,
    documents: int = 1,
    cache_len: int = 0,
    silu: bool = True,
) -> Case:
    """Return a case of the short convolution. shape: batch, tokens, tokens of x, channels."""
    batch, tokens, given, channels = shape

    def build(rng: np.random.Generator) -> Inputs:
        return {
            "x": normal(rng, (batch, given, channels), t),
            "weight": normal(rng, (channels, 4), scale=0.5),
            "doc_start": document_starts(rng, batch, tokens, documents),
            "cache_len": np.array([cache_len], np.int32),
            **({"dy": normal(rng, (batch, tokens, channels), t)} if back else {}),
        }

    def forward(device: Device, x: Inputs) -> Outputs:
        return {"y": device.short_conv(**x, silu=silu)}

    def backward(device: Device, x: Inputs) -> Outputs:
        return dict(zip(("dx", "dweight"), device.short_conv_backward(**x, silu=silu)))

    return _case("short_conv", variant, shape, t, build, backward if back else forward, back)


def _rule(
    variant: str,
    shape: tuple[int, int, int, int, int, int],
    t: Any,
    back: bool,
    *,
    documents: int = 1,
    cache_len: int = 0,
    decay: float = 0.2,
    ulps: float = BUILTIN_ULPS,
) -> Case:
    """Return a case of the delta rule. shape: batch, tokens, key heads, heads, widths of keys and values.

    With cache_len, it continues from a state; in the first sequence a document begins within the tokens.
    """
    batch, tokens, key_heads, heads, keys, values = shape
    options = {"key_heads": key_heads, "key_dim": keys}

    def build(rng: np.random.Generator) -> Inputs:
        starts = document_starts(rng, batch, tokens, documents)
        if cache_len:
            starts[0] = cache_len + np.where(np.arange(tokens) < tokens // 2, -1, tokens // 2)
        inputs: Inputs = {
            "qkv": normal(rng, (batch, tokens, 2 * key_heads * keys + heads * values), t),
            "g": (-decay * rng.random((batch, tokens, heads))).astype(np.float32),
            "beta": rng.random((batch, tokens, heads)).astype(np.float32),
            "doc_start": starts,
            "cache_len": np.array([cache_len], np.int32),
        }
        if cache_len:
            inputs["state"] = normal(rng, (batch, heads, keys, values))
        if back:
            inputs["states"] = ReferenceDevice().delta_rule(**inputs, **options)[1]
            inputs["dy"] = normal(rng, (batch, tokens, heads, values), t)
        return inputs

    def forward(device: Device, x: Inputs) -> Outputs:
        y, _ = device.delta_rule(**x, **options)
        return {"y": y, **({"state": x["state"]} if cache_len else {})}

    def backward(device: Device, x: Inputs) -> Outputs:
        return dict(zip(("dqkv", "dg", "dbeta"), device.delta_rule_backward(**x, **options)))

    return _case("delta_rule", variant, shape, t, build, backward if back else forward, back, ulps)


def _case(
    op: str, variant: str, shape: tuple[int, ...], t: Any, build: Any, call: Any, back: bool, ulps: float = BUILTIN_ULPS
) -> Case:
    op, text = f"{op}_backward" if back else op, "x".join(map(str, shape))
    name, direction = f"{op}/{variant}{'/' if variant else ''}{text}/{dtype_name(t)}", "backward" if back else "forward"
    return Case(name, op, direction, dtype_name(t), text, build, call, ulps, cancels=1.0)
