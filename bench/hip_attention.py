"""What the compiled flash attention does: executed instruction by instruction against float64, and counted.

    WGRAD_RUN_HSACO=.../run_hsaco.py TINYGRAD_DIR=.../tinygrad python bench/hip_attention.py [--arch gfx942] [--only dq]

Every kernel runs at a size that divides nothing (packed documents, grouped heads), waves forward and reversed
(run_hsaco.py; not gfx1201, whose matrix instructions it does not execute). isa_report.py, beside it, gives registers,
spills and LDS. On gfx942 it models two waves that share a SIMD from what they executed at a causal length of 1,024: the
share of time the matrix unit is busy at 300, 600 and 1,200 clocks of memory latency, of the whole run (`busy`) and of
tiles without a mask (`busy_loop`). The forward's figures are hip_attention_forward.py's. Rows go to
bench/results/hip_attention.jsonl. A model, not a card.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hip_attention_forward as forward
import hip_table
import numpy as np

OUT = Path(__file__).parent / "results" / "hip_attention.jsonl"
SOURCES = ("attention_forward", "attention_backward_dq", "attention_backward_dkv")
Arrays = dict[str, Any]


def decode(x: np.ndarray, tool: Any) -> np.ndarray:
    """A kernel's result in float64."""
    return (tool.unbf16(x) if x.dtype == np.uint16 else x).astype(np.float64)


def problem(
    tool: Any, kind: str, shape: tuple[int, int, int, int, int], packed: bool, window: int, size: float = 1.0
) -> Arrays:
    """Inputs of the backward of B, T, H, G, D as kernels read them, and dq, dk, dv in float64. size: of do."""
    rng = np.random.default_rng(0)
    b, t, h, g, d = shape
    doc_start = np.zeros((b, t), np.int32)
    if packed:
        for row, first in enumerate((t // 3, t // 2)[:b]):
            doc_start[row, first:] = first
            doc_start[row, t - 7 :] = t - 7
    stored, x = {}, {}
    for name, heads in (("q", h), ("k", g), ("v", g), ("grad", h)):
        values = rng.standard_normal((b, t, heads, d)) * (size if name == "grad" else 1.0)
        stored[name], x[name] = hip_table.encode(values, kind, tool)
    i = np.arange(t)
    seen = (i[None, None, :] >= doc_start[:, :, None]) & (i[None, None, :] <= i[None, :, None])
    if window:
        seen &= i[None, :, None] - i[None, None, :] < window
    scale = d**-0.5
    wide = {n: np.repeat(x[n], h // g, axis=2) for n in ("k", "v")}
    s = np.where(seen[:, None], scale * np.einsum("bthd,bjhd->bhtj", x["q"], wide["k"]), -np.inf)
    top = s.max(-1, keepdims=True)
    lse = (top + np.log(np.exp(s - top).sum(-1, keepdims=True)))[..., 0]
    p = np.exp(s - lse[..., None])
    delta = np.einsum("bhtj,bjhd,bthd->bht", p, wide["v"], x["grad"])
    ds = p * (np.einsum("bthd,bjhd->bhtj", x["grad"], wide["v"]) - delta[..., None]) * scale
    by_group = (b, t, g, h // g, d)
    return stored | {
        "lse": lse.astype(np.float32),
        "delta": delta.astype(np.float32),
        "grad_lengths": np.linalg.norm(x["grad"], axis=-1).transpose(0, 2, 1).astype(np.float32),
        "v_lengths": np.linalg.norm(x["v"], axis=-1).transpose(0, 2, 1).astype(np.float32),
        "doc_start": doc_start,
        "dq": np.einsum("bhtj,bjhd->bthd", ds, wide["k"]),
        "dk": np.einsum("bhtj,bthd->bjhd", ds, x["q"]).reshape(by_group).sum(3),
        "dv": np.einsum("bhtj,bthd->bjhd", p, x["grad"]).reshape(by_group).sum(3),
    }


def launch(
    name: str, arch: str, x: Arrays, window: int = 0, splits: int = 1
) -> tuple[tuple[int, int, int], int, list[Any], list[str]]:
    """Grid, threads, arguments and the results' names of attention_backward_dq_* or dkv_*."""
    (b, t, h, d), g = x["q"].shape, x["k"].shape[2]
    columns, threads = (256, 512) if arch.startswith("gfx9") else (64, 128)
    blocks, kind = -(-t // columns), "u16" if "bf16" in name else "f16"
    inputs = [x[n] for n in ("grad", "q", "k", "v", "lse", "delta", "grad_lengths", "v_lengths", "doc_start")]
    numbers = [np.int32(n) for n in (t, h, g)]
    tail = [np.int32(window), np.float32(d**-0.5)]
    if "_dq_" in name:
        return (h, b, blocks), threads, [*inputs, ("out", (b, t, h, d), kind), *numbers, *tail], ["dq"]
    out = ("out", (b, t, g, d), kind) if splits == 1 else ("out", (splits, b, t, g, d), "f32")
    return (g * splits, b, blocks), threads, [*inputs, out, out, *numbers, np.int32(splits), *tail], ["dk", "dv"]


def execute(
    tool: Any,
    path: Path,
    name: str,
    arch: str,
    *,
    length: int = 83,
    window: int = 0,
    splits: int = 1,
    size: float = 1.0,
    orders: tuple[str, ...] = ("fwd", "rev"),
) -> dict[str, float]:
    """Largest error relative to the largest result, for each order of waves."""
    kind, width = name.split("_")[-2:]
    x = problem(tool, kind, (2, length, 6, 2, int(width)), True, window, size)
    grid, threads, arguments, names = launch(name, arch, x, window, splits)
    errors = {}
    for order in orders:
        found = tool.run(str(path), name, grid, (threads, 1, 1), arguments, order=order)[-len(names) :]
        worst = 0.0
        for n, got in zip(names, found):
            value = decode(got, tool)
            value = value.sum(0) if value.ndim == 5 else value
            error = float(np.abs(value - x[n]).max() / np.abs(x[n]).max())
            worst = max(worst, error) if np.isfinite(error) else float("inf")
        errors[order] = float(f"{worst:.2e}")
    return errors


def tiles_of(wave: list[str]) -> list[list[str]]:
    """A wave's instructions from barrier to barrier."""
    found: list[list[str]] = [[]]
    for text in wave:
        found[-1].append(text)
        if text.startswith("s_barrier"):
            found.append([])
    return found


def busy(tool: Any, report: Any, path: Path, name: str, arch: str, length: int = 1024) -> dict[str, dict[int, float]]:
    """Model of the first and the middle wave of the longest work-group, together on one SIMD, by memory latency."""
    kind, width = name.split("_")[-2:]
    x = problem(tool, kind, (1, length, 1, 1, int(width)), False, 0)
    grid, threads, arguments, _ = launch(name, arch, x)
    kernel = tool.load(str(path), name)
    trace: dict[Any, Any] = {((0, 0, 0), wave): None for wave in (0, threads // kernel.ws // 2)}
    kernel.run(grid, (threads, 1, 1), arguments, workgroups=[(0, 0, 0)], trace=trace)
    text = {address: t for address, t, _ in report.kernel_listing(tool.CodeObject(str(path)), name)}
    waves = [[text[a] for a in addresses] for addresses in trace.values()]
    middle = len(tiles_of(waves[0])) // 2  # whole tiles: the mask's are at one end
    loop = [sum(tiles_of(w)[middle - 4 : middle + 4], []) for w in waves]
    result: dict[str, dict[int, float]] = {"busy": {}, "busy_loop": {}}
    for key, program in (("busy", waves), ("busy_loop", loop)):
        for latency in forward.LATENCIES:
            slots, matrix = report.simulate(arch, kernel.ws, program, latency, 100)
            result[key][latency] = round(matrix / slots, 4)
    return result


def row(tool: Any, report: Any, path: Path, arch: str, kernel: dict[str, Any]) -> dict[str, Any]:
    """A row of the table."""
    name = kernel["name"]
    result = hip_table.registers(arch, kernel) | {"widths": kernel["hot_loop"]["widths"]}
    unread = hip_table.beyond_the_executor(report, tool.CodeObject(str(path)), name)
    if "_forward_" in name:
        result |= forward.figures(tool, report, path, name, arch, executed=arch in hip_table.EXECUTED and not unread)
        return result | ({"not_executed": hip_table.NOT_EXECUTED} if unread else {})
    if arch == "gfx942":
        result |= busy(tool, report, path, name, arch)
    if unread:
        result["not_executed"] = hip_table.NOT_EXECUTED
    elif arch in hip_table.EXECUTED:
        result["error"] = execute(tool, path, name, arch)
        result["error_window"] = execute(tool, path, name, arch, length=150, window=29, splits=3, orders=("rev",))
    return result


if __name__ == "__main__":
    hip_table.main(__doc__, OUT, SOURCES, row)
