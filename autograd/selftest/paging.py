"""Self-test cases of the paged KV cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.selftest.case import BUILTIN_ULPS, F32, Case, Inputs, Outputs, dtype_name, normal
from wgrad.device.contract import PAGE, Device

_POOL = 11  # pages of the cache


def cases(t: np.dtype) -> list[Case]:
    found = [
        _append("rotated", (3, 1, 2, 64), t, columns=32),
        _attention("rows", (3, 4, 2, 64), t, [0, 63, 130]),
    ]
    if t != F32:
        return found
    return found + [
        _append("rotated prefill", (2, 5, 3, 10), t, columns=5),
        _append("partial", (2, 3, 1, 32), t, columns=12),
        _append("interleaved", (2, 3, 2, 12), t, columns=5, interleaved=True),
        _append("as it is", (3, 7, 3, 6), t),
        _attention("odd width", (2, 4, 2, 10), t, [64, 12]),
        _attention("window and softcap", (2, 4, 1, 40), t, [191, 65], window=66, softcap=1.5),
        _attention("many heads", (1, 18, 1, 16), t, [100]),
    ]


def _pages(rng: np.random.Generator, batch: int, width: int) -> np.ndarray:
    """Return page numbers in random order, int32 [batch, width]. The sequences share their first page."""
    pages: np.ndarray = rng.permutation(_POOL)[: batch * width].reshape(batch, width).astype(np.int32)
    pages[:, 0] = pages[0, 0]
    return pages


def _append(
    variant: str, new: tuple[int, int, int, int], t: Any, *, columns: int = 0, interleaved: bool = False
) -> Case:
    """Return a case of appending to the cache. new: B, T, G, D; columns: of the rotation's tables, 0: no rotation.

    The last sequence begins before its first position, and the last token of the first sequence has no page.
    """
    b, length, g, d = new

    def build(rng: np.random.Generator) -> Inputs:
        inputs: Inputs = {name: normal(rng, (_POOL, PAGE, g, d), t) for name in ("keys", "values")}
        inputs |= {name: normal(rng, (b * length, g, d), t) for name in ("k", "v")}
        places = np.arange(length)[None] + (PAGE - 2 + 7 * np.arange(b))[:, None]
        places[-1] = np.arange(length) - 1
        places[0, -1] = 2 * PAGE
        inputs |= {"pages": _pages(rng, b, 2), "places": places.reshape(-1).astype(np.int32)}
        return inputs | ({name: normal(rng, (2 * PAGE + 1, columns)) for name in ("cos", "sin")} if columns else {})

    def call(device: Device, x: Inputs) -> Outputs:
        device.paged_append(**x, interleaved=interleaved)
        return {"keys": x["keys"], "values": x["values"]}

    shape = "x".join(map(str, new))
    return Case(
        f"paged_append/{variant}/{shape}/{dtype_name(t)}", "paged_append", "forward", dtype_name(t), shape, build, call
    )


def _attention(
    variant: str,
    shape: tuple[int, int, int, int],
    t: Any,
    places: list[int],
    *,
    window: int = 0,
    softcap: float = 0.0,
) -> Case:
    """Return a case of attention on the cache. shape: B, H, G, D. places: position of each sequence's query."""
    b, h, g, d = shape
    options = {"scale": d**-0.5, "window": window, "softcap": softcap}

    def build(rng: np.random.Generator) -> Inputs:
        pools = {name: normal(rng, (_POOL, PAGE, g, d), t) for name in ("keys", "values")}
        pages = {"pages": _pages(rng, b, 3), "places": np.array(places, np.int32)}
        return {"q": normal(rng, (b, 1, h, d), t), **pools, **pages}

    def call(device: Device, x: Inputs) -> Outputs:
        return dict(zip(("o", "lse"), device.paged_attention(**x, **options)))

    text = "x".join(map(str, shape))
    name = f"paged_attention/{variant}/{text}/{dtype_name(t)}"
    return Case(name, "paged_attention", "forward", dtype_name(t), text, build, call, BUILTIN_ULPS)
