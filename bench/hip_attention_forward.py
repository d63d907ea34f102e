"""The forward's part of hip_attention.py: inputs, float64 results, and the model of two waves that share a SIMD."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hip_table
import numpy as np

Arrays = dict[str, Any]
LATENCIES = (300, 600, 1200)
LENGTHS = (2304, 4608)  # of keys, in the model: divisible by a work-group's 384 queries


def problem(
    tool: Any, kind: str, shape: tuple[int, int, int, int, int, int], cache_len: int, window: int, packed: bool
) -> Arrays:
    """Inputs of B, T, S, H, G, D as kernels read them, and o, lse in float64. Scores outgrow the first maximum."""
    rng = np.random.default_rng(0)
    b, t, s, h, g, d = shape
    doc_start = np.zeros((b, t), np.int32)
    if packed:
        doc_start[:, t // 2 :] = cache_len + t // 3
    grow = np.linspace(0.5, 4.0, s)[:, None, None]
    q, k, v = (rng.standard_normal((b, n, heads, d)) for n, heads in ((t, h), (s, g), (s, g)))
    stored = {n: hip_table.encode(x, kind, tool) for n, x in (("q", q), ("k", k * grow), ("v", v))}
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


def launch(
    name: str, arch: str, x: Arrays, window: int = 0, splits: int = 1
) -> tuple[tuple[int, int, int], int, list[Any]]:
    """Grid, threads and arguments of attention_forward_*; o and lse are the last two arrays."""
    (b, t, h, d), (s, g) = x["q"].shape, x["k"].shape[1:3]
    queries, threads = (384, 512) if arch.startswith("gfx9") else (128, 256)
    kind = "f32" if splits > 1 else "u16" if "bf16" in name else "f16"
    parts = (splits,) if splits > 1 else ()
    out = [("out", (*parts, b, t, h, d), kind), ("out", (*parts, b, h, t), "f32")]
    numbers = [np.int32(n) for n in (b, t, s, h, g, splits, window)]
    arguments = [*(x[n] for n in ("q", "k", "v", "doc_start", "cache_len")), *out, *numbers, np.float32(d**-0.5)]
    return (splits * -(-t // queries), h, b), threads, arguments


def execute(
    tool: Any, path: Path, name: str, arch: str, *, window: int = 0, splits: int = 1, order: str = "fwd"
) -> dict[str, float]:
    """Largest errors: of o relative to the largest result, of lse absolute. Shares are put together here."""
    kind, width = ("f16" if "_f16_" in name else "bf16"), int(name.split("_")[-1])
    x = problem(tool, kind, (2, 83, 150, 4, 2, width), 67, window, packed=True)
    grid, threads, arguments = launch(name, arch, x, window, splits)
    o, lse = tool.run(str(path), name, grid, (threads, 1, 1), arguments, order=order)[5:7]
    o = (tool.unbf16(o) if o.dtype == np.uint16 else o).astype(np.float64)
    if splits > 1:
        top = lse.astype(np.float64).max(0)
        weight = np.exp(lse - top)
        o = (o * (weight / weight.sum(0)).transpose(0, 1, 3, 2)[..., None]).sum(0)
        lse = top + np.log(weight.sum(0))
    off = np.abs(o - x["o"]).max() / np.abs(x["o"]).max(), np.abs(lse - x["lse"]).max()
    return {n: float(f"{e:.2e}") if np.isfinite(e) else float("inf") for n, e in zip(("o", "lse"), off)}


def traced(tool: Any, path: Path, name: str, arch: str, keys: int, causal: bool) -> tuple[Any, list[list[int]]]:
    """Instruction addresses of the waves 0 and 4 of the longest work-group, as executed: they share a SIMD."""
    kind, width = ("f16" if "_f16_" in name else "bf16"), int(name.split("_")[-1])
    t = keys if causal else 384
    rng = np.random.default_rng(0)
    x = {n: hip_table.encode(rng.standard_normal((1, rows, 1, width)), kind, tool)[0]
         for n, rows in (("q", t), ("k", keys), ("v", keys))}  # fmt: skip
    x |= {"doc_start": np.zeros((1, t), np.int32), "cache_len": np.array([0 if causal else keys], np.int32)}
    grid, threads, arguments = launch(name, arch, x)
    kernel = tool.load(str(path), name)
    trace: dict[Any, Any] = {((0, 0, 0), wave): None for wave in (0, 4)}
    kernel.run(grid, (threads, 1, 1), arguments, workgroups=[(0, 0, 0)], trace=trace)
    return kernel, list(trace.values())


def busy(tool: Any, report: Any, path: Path, name: str, arch: str) -> dict[str, dict[int, float]]:
    """Share of time that the matrix unit is busy, by memory latency: of a whole run over LENGTHS[1] keys, and of what
    that has more than one over LENGTHS[0] (`_loop`: no start and end); without a mask and causal."""
    text = {address: t for address, t, _ in report.kernel_listing(tool.CodeObject(str(path)), name)}
    result: dict[str, dict[int, float]] = {}
    for key, causal in (("busy", False), ("busy_causal", True)):
        runs = []
        for keys in LENGTHS:
            kernel, waves = traced(tool, path, name, arch, keys, causal)
            program = [[text[a] for a in wave] for wave in waves]
            runs.append([report.simulate(arch, kernel.ws, program, latency, 100) for latency in LATENCIES])
        result[key] = {n: round(m / slots, 4) for n, (slots, m) in zip(LATENCIES, runs[1])}
        result[f"{key}_loop"] = {
            n: round((m - m0) / (slots - slots0), 4) for n, (slots0, m0), (slots, m) in zip(LATENCIES, *runs)
        }
    return result


def figures(tool: Any, report: Any, path: Path, name: str, arch: str, *, executed: bool) -> dict[str, Any]:
    """What a row of the table says of a forward kernel beside its registers."""
    found: dict[str, Any] = {}
    if arch == "gfx942":
        found |= busy(tool, report, path, name, arch)
    if executed:
        found["error"] = {order: execute(tool, path, name, arch, order=order) for order in ("fwd", "rev")}
        found["error_window"] = {"rev": execute(tool, path, name, arch, window=29, order="rev")}
        found["error_splits"] = {"fwd": execute(tool, path, name, arch, splits=2)}
    return found
