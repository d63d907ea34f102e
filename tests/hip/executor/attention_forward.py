"""The forward's part of hip_attention: inputs, float64 results, and the model of two waves that share a SIMD."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tests.hip.executor.call import Call, Out, call
from tests.hip.executor.kernel import Kernel
from tests.hip.executor.numbers import DTYPES, encode
from tests.hip.executor.schedule import simulate
from tests.hip.executor.waves import Grid, Order, trace
from wgrad.hip.attention.attention import block_of

Arrays = dict[str, Any]
LATENCIES = (300, 600, 1200)  # clocks
L1_LATENCY = 600  # at which L1 is counted
DIES = 3  # that the kernels are told of: work-groups divide by few numbers
_LENGTHS = (2304, 4608)  # of keys, in the model: divisible by a work-group's 384 queries
RDNA_LENGTH = 2304


def _problem(shape: tuple[int, ...], kind: str, cache_len: int, window: int) -> Arrays:
    """Inputs of B, T, S, H, G, D as kernels read them, packed, and o, lse in float64. Scores outgrow the first
    maximum."""
    rng = np.random.default_rng(0)
    b, t, s, h, g, d = shape
    doc_start = np.zeros((b, t), np.int32)
    doc_start[:, t // 2 :] = cache_len + t // 3
    grow = np.linspace(0.5, 4.0, s)[:, None, None]
    q, k, v = (rng.standard_normal((b, n, heads, d)) for n, heads in ((t, h), (s, g), (s, g)))
    stored = {n: encode(x, kind) for n, x in (("q", q), ("k", k * grow), ("v", v))}
    wide = {n: np.repeat(stored[n][1], h // g, axis=2) for n in ("k", "v")}
    i, j = cache_len + np.arange(t), np.arange(s)
    seen = (j[None, None] >= doc_start[:, :, None]) & (j[None, None] <= i[None, :, None])
    if window:
        seen &= (i[:, None] - j[None] < window)[None]
    scores = np.where(seen[:, None], d**-0.5 * np.einsum("bthd,bshd->bhts", stored["q"][1], wide["k"]), -np.inf)
    top = scores.max(-1, keepdims=True)
    p = np.exp(scores - top)
    total = p.sum(-1, keepdims=True)
    return {n: x[0] for n, x in stored.items()} | {
        "doc_start": doc_start,
        "cache_len": np.array([cache_len], np.int32),
        "o": np.einsum("bhts,bshd->bthd", p / total, wide["v"]),
        "lse": (top + np.log(total))[..., 0],
    }


def _launch(kernel: Kernel, x: Arrays, window: int = 0, splits: int = 1) -> tuple[Grid, int, list[Any]]:
    """Grid, threads and arguments of attention_forward_*; o and lse are the last two arrays."""
    (b, t, h, d), (s, g) = x["q"].shape, x["k"].shape[1:3]
    queries, threads = block_of(kernel.lanes, d)
    parts = (splits,) if splits > 1 else ()
    dtype = np.float32 if splits > 1 else x["q"].dtype
    out = [Out((*parts, b, t, h, d), dtype), Out((*parts, b, h, t), np.float32)]
    numbers = [np.int32(n) for n in (b, t, s, h, g, splits, DIES, window)]
    arguments = [*(x[n] for n in ("q", "k", "v", "doc_start", "cache_len")), *out, *numbers, np.float32(d**-0.5)]
    return (h * b, splits * -(-t // queries), 1), threads, arguments


def kind_of(kernel: Kernel) -> tuple[str, int]:
    """Dtype and head width of a kernel."""
    return ("f16" if "_f16_" in kernel.name else "bf16"), int(kernel.name.split("_")[-1])


def execute(kernel: Kernel, *, window: int = 0, splits: int = 1, order: Order = "fwd") -> dict[str, float]:
    """Largest errors: of o relative to the largest result, of lse absolute. Shares are put together here."""
    kind, width = kind_of(kernel)
    x = _problem((2, 83, 150, 4, 2, width), kind, 67, window)
    o, lse = (a.astype(np.float64) for a in call(kernel, *_launch(kernel, x, window, splits), order)[5:7])
    if splits > 1:
        top = lse.max(0)
        weight = np.exp(lse - top)
        o = (o * (weight / weight.sum(0)).transpose(0, 1, 3, 2)[..., None]).sum(0)
        lse = top + np.log(weight.sum(0))
    off = np.abs(o - x["o"]).max() / np.abs(x["o"]).max(), np.abs(lse - x["lse"]).max()
    return {n: float(f"{e:.2e}") if np.isfinite(e) else float("inf") for n, e in zip(("o", "lse"), off)}


def _traced(kernel: Kernel, keys: int, causal: bool) -> list[list[str]]:
    """Trace the waves 0 and 4 of the longest work-group, which share a SIMD."""
    kind, width = kind_of(kernel)
    t = keys if causal else 384
    rng = np.random.default_rng(0)
    x = {n: rng.standard_normal((1, rows, 1, width)).astype(DTYPES[kind])
         for n, rows in (("q", t), ("k", keys), ("v", keys))}  # fmt: skip
    x |= {"doc_start": np.zeros((1, t), np.int32), "cache_len": np.array([0 if causal else keys], np.int32)}
    made = Call(kernel, *_launch(kernel, x))
    waves = trace(made.launch, (0, 0, 0), (0, 4))
    made.free()
    return [[kernel.listing[a].text for a in wave] for wave in waves]


def shares_by_waves(kernel: Kernel, traced: list[list[str]], groups: Iterable[int]) -> dict[str, dict[int, float]]:
    """Share of time that the tensor cores are busy by waves of a SIMD, and by latency. traced: what the waves of a
    work-group that share a SIMD execute; groups: how many of these it has."""
    found = {}
    for count in groups:
        runs = {n: simulate(kernel.code.architecture, kernel.lanes, traced * count, n, groups=count) for n in LATENCIES}
        found[str(len(traced) * count)] = {n: round(m / slots, 4) for n, (slots, m) in runs.items()}
    return found


def busy_of_groups(kernel: Kernel) -> dict[str, dict[str, dict[int, float]]]:
    """Return `busy` and `busy_causal` of RDNA with RDNA_LENGTH keys, by waves per SIMD.

    A SIMD has two waves of one work-group, or four of two.
    """
    keys = {"busy_by_waves": False, "busy_causal_by_waves": True}
    return {key: shares_by_waves(kernel, _traced(kernel, RDNA_LENGTH, causal), (1, 2)) for key, causal in keys.items()}


def busy(kernel: Kernel) -> dict[str, dict[int, float]]:
    """Share of time that the tensor cores are busy, by memory latency: of a whole run over the longer of _LENGTHS, and
    of what that has more than one over the shorter (`_loop`: no start and end); without a mask and causal; at
    L1_LATENCY with L1's bandwidth counted too (`_l1`)."""
    result: dict[str, dict[int, float]] = {}
    for key, causal in (("busy", False), ("busy_causal", True)):
        traced = [_traced(kernel, keys, causal) for keys in _LENGTHS]
        for suffix, latencies in (("", LATENCIES), ("_l1", (L1_LATENCY,))):
            runs = [
                [simulate(kernel.code.architecture, kernel.lanes, p, n, l1=bool(suffix)) for n in latencies]
                for p in traced
            ]
            result[key + suffix] = {n: round(m / slots, 4) for n, (slots, m) in zip(latencies, runs[1])}
            result[f"{key}_loop{suffix}"] = {
                n: round((m - m0) / (slots - slots0), 4) for n, (slots0, m0), (slots, m) in zip(latencies, *runs)
            }
    return result


def errors(kernel: Kernel) -> dict[str, dict[str, dict[str, float]]]:
    """Return the errors in both orders, with a window, and with splits of the keys."""
    return {
        "error": {order: execute(kernel, order=order) for order in ("fwd", "rev")},
        "error_window": {"rev": execute(kernel, window=29, order="rev")},
        "error_splits": {"fwd": execute(kernel, splits=2)},
    }
