"""hip_attention: the compiled flash attention, executed against float64, counted and modeled.

Every kernel runs at a size that divides nothing (packed documents, grouped heads), waves forward and reversed. On CDNA
a model has two waves that share a SIMD, by what they executed: the share of time that the tensor cores are busy at 300,
600 and 1,200 clocks of memory latency, of the whole run (`busy`; of the backward: causal, length 1,024) and of its
inner loop (`busy_loop`); at 600 clocks with L1's bandwidth counted too (`busy_l1`, `busy_loop_l1`). On gfx950 also the
share of matrix instructions that have CDNA4's depth (`deep`).
On RDNA that of the whole run by waves of a SIMD (`busy_by_waves`, `busy_causal_by_waves`). A model, not a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.hip.executor import attention_forward
from tests.hip.executor.attention_forward import (
    DIES,
    L1_LATENCY,
    LATENCIES,
    RDNA_LENGTH,
    kind_of,
    shares_by_waves,
)
from tests.hip.executor.call import Call, Out, call
from tests.hip.executor.device import shipped
from tests.hip.executor.isa import deep_share, hot_loop, instructions, registers, widths
from tests.hip.executor.kernel import Kernel
from tests.hip.executor.numbers import encode
from tests.hip.executor.occupancy import SIMDS, waves_that_fit
from tests.hip.executor.operators import ORDERS
from tests.hip.executor.schedule import simulate
from tests.hip.executor.table import Object, Row
from tests.hip.executor.waves import Grid, Order, trace
from wgrad.hip.attention.attention_backward import columns_of

Arrays = dict[str, Any]


def _inputs(kind: str, shape: tuple[int, ...], packed: bool) -> tuple[Arrays, Arrays]:
    """q, k, v and the result's gradient of B, T, H, G, D as kernels read them and in float64; doc_start."""
    rng = np.random.default_rng(0)
    b, t, h, g, d = shape
    doc_start = np.zeros((b, t), np.int32)
    if packed:
        for row, first in enumerate((t // 3, t // 2)[:b]):
            doc_start[row, first:] = first
            doc_start[row, t - 7 :] = t - 7
    stored, x = {}, {}
    for name, heads in (("q", h), ("k", g), ("v", g), ("grad", h)):
        stored[name], x[name] = encode(rng.standard_normal((b, t, heads, d)), kind)
    return {**stored, "doc_start": doc_start}, x


def _problem(kind: str, shape: tuple[int, ...], packed: bool, window: int) -> Arrays:
    """Make inputs of the backward as kernels read them, and dq, dk, dv in float64."""
    stored, x = _inputs(kind, shape, packed)
    b, t, h, g, d = shape
    i, doc_start = np.arange(t), stored["doc_start"]
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
        "dq": np.einsum("bhtj,bjhd->bthd", ds, wide["k"]),
        "dk": np.einsum("bhtj,bthd->bjhd", ds, x["q"]).reshape(by_group).sum(3),
        "dv": np.einsum("bhtj,bthd->bjhd", p, x["grad"]).reshape(by_group).sum(3),
    }


def _launch(
    kernel: Kernel, x: Arrays, window: int = 0, splits: int = 1
) -> tuple[Grid, int, list[Any], tuple[str, ...]]:
    """Grid, threads, arguments and the results' names of attention_backward_dq_* or dkv_*."""
    (b, t, h, d), g, dtype = x["q"].shape, x["k"].shape[2], x["q"].dtype
    columns, threads = columns_of(kernel.lanes, d)
    blocks = -(-t // columns)
    inputs = [x[n] for n in ("grad", "q", "k", "v", "lse", "delta", "grad_lengths", "v_lengths", "doc_start")]
    numbers = [np.int32(n) for n in (t, h, g)]
    tail = [np.int32(window), np.float32(d**-0.5)]
    if "_dq_" in kernel.name:
        return (
            (h * b, blocks, 1),
            threads,
            [*inputs, Out((b, t, h, d), dtype), *numbers, np.int32(DIES), *tail],
            ("dq",),
        )
    out = Out((b, t, g, d), dtype) if splits == 1 else Out((splits, b, t, g, d), np.float32)
    arguments = [*inputs, out, out, *numbers, np.int32(splits), *tail]
    return (g * splits, b, blocks), threads, arguments, ("dk", "dv")


def execute(
    kernel: Kernel, *, length: int = 83, window: int = 0, splits: int = 1, orders: tuple[Order, ...] = ORDERS
) -> dict[str, float]:
    """Largest error relative to the largest result, for each order of waves."""
    kind, width = kind_of(kernel)
    x = _problem(kind, (2, length, 6, 2, width), True, window)
    grid, threads, arguments, names = _launch(kernel, x, window, splits)
    errors: dict[str, float] = {}
    for order in orders:
        found = call(kernel, grid, threads, arguments, order)[-len(names) :]
        worst = 0.0
        for n, got in zip(names, found):
            value = got.astype(np.float64)
            value = value.sum(0) if value.ndim == 5 else value
            error = float(np.abs(value - x[n]).max() / np.abs(x[n]).max())
            worst = max(worst, error) if np.isfinite(error) else float("inf")
        errors[order] = float(f"{worst:.2e}")
    return errors


def _phases(wave: list[str]) -> list[list[str]]:
    """A wave's instructions from barrier to barrier."""
    found: list[list[str]] = [[]]
    for text in wave:
        found[-1].append(text)
        if text.startswith("s_barrier"):
            found.append([])
    return found


def _traced(kernel: Kernel, length: int) -> list[list[str]]:
    """Trace, causal, the waves of the longest work-group that share a SIMD with its first."""
    kind, width = kind_of(kernel)
    grid, threads, arguments, _ = _launch(kernel, _problem(kind, (1, length, 1, 1, width), False, 0))
    made = Call(kernel, grid, threads, arguments)
    addresses = trace(made.launch, (0, 0, 0), tuple(range(0, threads // kernel.lanes, SIMDS)))
    made.free()
    return [[kernel.listing[a].text for a in wave] for wave in addresses]


def busy_of_groups(kernel: Kernel, size: Row) -> dict[str, dict[str, dict[int, float]]]:
    """Return how busy RDNA is in causal attention, with two waves per SIMD and as many as fit, each a work-group."""
    fit = waves_that_fit(kernel.code.architecture, size["vgpr"], size["lds"], SIMDS)
    return {"busy_causal_by_waves": shares_by_waves(kernel, _traced(kernel, RDNA_LENGTH), sorted({2, fit}))}


def busy(kernel: Kernel, length: int = 1024) -> dict[str, dict[int, float]]:
    """Model of the first and the middle wave of the longest work-group, together on one SIMD, by memory latency."""
    waves = _traced(kernel, length)
    middle = len(_phases(waves[0])) // 2  # what is masked is at one end
    loop = [sum(_phases(w)[middle - 16 : middle + 16], []) for w in waves]  # of 4 or 8 phases a tile
    result: dict[str, dict[int, float]] = {}
    for key, programs in (("busy", waves), ("busy_loop", loop)):
        for suffix, latencies in (("", LATENCIES), ("_l1", (L1_LATENCY,))):
            architecture, l1 = kernel.code.architecture, bool(suffix)
            runs = {n: simulate(architecture, kernel.lanes, programs, n, l1=l1) for n in latencies}
            result[key + suffix] = {n: round(matrix / slots, 4) for n, (slots, matrix) in runs.items()}
    return result


def rows(made: Object, kernels: list[str], say: Callable[[str], None]) -> list[Row]:
    """A row for each kernel of a code object."""
    code, found = shipped(made.source, made.architecture), []
    for name in kernels:
        row: Row = {"kernel": name, **registers(code, name), "widths": widths(hot_loop(instructions(code, name)))}
        forward = "_forward_" in name
        kernel = Kernel(code, name)
        if made.architecture.startswith("gfx9"):
            row |= attention_forward.busy(kernel) if forward else busy(kernel)
        else:
            row |= attention_forward.busy_of_groups(kernel) if forward else busy_of_groups(kernel, row)
        if made.architecture == "gfx950":
            row["deep"] = deep_share([i.text for i in hot_loop(instructions(code, name))])
        if forward:
            row |= attention_forward.errors(kernel)
        else:
            row["error"] = execute(kernel)
            row["error_window"] = execute(kernel, length=150, window=29, splits=3, orders=("rev",))
        found.append(row)
        say(f"{name}: {row['error']}")
    return found
