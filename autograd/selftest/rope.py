"""Self-test cases of rotary embedding, and of rotating keys into the cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.selftest.case import Case, Inputs, Outputs, dtype_name, forward_and_backward, normal
from wgrad.device.contract import Device


def cases(t: np.dtype) -> list[Case]:
    found = []
    for n, h, d, columns, interleaved in (
        (37, 3, 64, 32, False),
        (41, 2, 40, 20, False),
        (5, 4, 128, 64, False),
        (1, 1, 6, 3, False),
        (13, 3, 64, 24, False),
        (7, 2, 22, 7, False),
        (11, 3, 20, 10, True),
        (7, 2, 24, 7, True),
    ):

        def build(rng: np.random.Generator, n: int = n, h: int = h, d: int = d, columns: int = columns) -> Inputs:
            angle = np.outer(np.arange(53), 10000.0 ** (-np.arange(columns) / columns))
            positions = rng.integers(0, 53, n).astype(np.int32)
            cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
            return {"x": normal(rng, (n, h, d), t), "cos": cos, "sin": sin, "positions": positions}

        for inverse in (False, True):

            def call(device: Device, x: Inputs, inverse: bool = inverse, interleaved: bool = interleaved) -> Outputs:
                options = {"inverse": inverse, "interleaved": interleaved}
                return {"y": device.rope(x["x"], x["cos"], x["sin"], x["positions"], **options)}

            shape, direction = f"{n}x{h}x{d}", "backward" if inverse else "forward"
            partial = f" of which {2 * columns} turn" if 2 * columns < d else ""
            pairs = " pairs side by side" if interleaved else ""
            name = f"rope/{direction}/{shape}{partial}{pairs}/{dtype_name(t)}"
            found.append(Case(name, "rope", direction, dtype_name(t), shape, build, call))
    for n, h, g, d in ((37, 3, 1, 64), (21, 4, 2, 40), (1, 2, 2, 6)):
        found += _split(n, h, g, d, t)
    found += _split(11, 3, 2, 20, t, columns=6)
    found += _split(9, 3, 1, 20, t, interleaved=True)
    return found + [
        _rope_append("partial", (2, 3, 3, 32), t, keys=17, cache_len=8, columns=12),
        _rope_append("interleaved", (2, 3, 2, 12), t, keys=17, cache_len=8, columns=5, interleaved=True),
        _rope_append("partial decode", (3, 1, 2, 22), t, keys=17, cache_len=8, columns=7),
        _rope_append("prefill", (2, 5, 3, 10), t, keys=37, cache_len=29),
        _rope_append("full", (3, 7, 2, 64), t, keys=11, cache_len=4),
        _rope_append("decode", (1, 1, 2, 128), t, keys=53, cache_len=41),
        _rope_append("past the end", (2, 7, 1, 40), t, keys=19, cache_len=15),
    ]


def _split(n: int, h: int, g: int, d: int, t: Any, columns: int = 0, interleaved: bool = False) -> list[Case]:
    """Return cases of queries, keys and values in one array, and of their gradients."""

    def build(rng: np.random.Generator) -> Inputs:
        inputs: Inputs = {"qkv": normal(rng, (n, (h + 2 * g) * d), t), "dq": normal(rng, (n, h, d), t)}
        inputs |= {name: normal(rng, (n, g, d), t) for name in ("dk", "dv")}
        inputs |= {name: normal(rng, (61, columns or d // 2)) for name in ("cos", "sin")}
        return {**inputs, "positions": rng.integers(0, 61, n).astype(np.int32)}

    def forward(device: Device, x: Inputs) -> Outputs:
        tables = (x["cos"], x["sin"], x["positions"])
        return dict(zip("qkv", device.rope_split(x["qkv"], *tables, heads=h, kv_heads=g, interleaved=interleaved)))

    def backward(device: Device, x: Inputs) -> Outputs:
        tables = (x["cos"], x["sin"], x["positions"])
        return {"dqkv": device.rope_split_backward(x["dq"], x["dk"], x["dv"], *tables, interleaved=interleaved)}

    shape = f"{n}x{h}+{g}x{d}" + (f" of which {2 * columns} turn" if columns else "")
    shape += " pairs side by side" if interleaved else ""
    return forward_and_backward("rope_split", shape, dtype_name(t), build, forward, backward)


def _rope_append(
    variant: str,
    new: tuple[int, int, int, int],
    t: Any,
    *,
    keys: int,
    cache_len: int,
    columns: int = 0,
    interleaved: bool = False,
) -> Case:
    """Return a case of rotating into the cache. new: B, T, G, D; keys: S; columns: of the tables, 0: D/2."""
    b, length, g, d = new

    def build(rng: np.random.Generator) -> Inputs:
        inputs: Inputs = {name: normal(rng, (b * length, g, d), t) for name in ("k", "v")}
        inputs |= {name: normal(rng, (61, columns or d // 2)) for name in ("cos", "sin")}
        inputs["positions"] = rng.integers(0, 61, b * length).astype(np.int32)
        inputs |= {name: normal(rng, (b, keys, g, d), t) for name in ("keys", "values")}
        return {**inputs, "cache_len": np.array([cache_len], np.int32)}

    def call(device: Device, x: Inputs) -> Outputs:
        device.rope_append(*x.values(), interleaved=interleaved)
        return {"keys": x["keys"], "values": x["values"]}

    shape = f"{b}x{length}x{g}x{d}"
    name = f"rope_append/{variant}/{shape}/{dtype_name(t)}"
    return Case(name, "rope_append", "forward", dtype_name(t), shape, build, call)
