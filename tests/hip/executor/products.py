"""hip_isa: the compiled products, executed at sizes that divide nothing, waves forward and reversed, and counted.

A row has registers, spills, how many instructions of loops invalidate a cache, widths of the hot loop's accesses, the
share of time that the tensor cores are busy at 600 clocks of memory latency by waves a SIMD, as many as fit, without
and with L1's bandwidth counted (schedule.py), and of MI300's products of 16 bits with what L1 reads from L2 counted,
whose lines for 64 of K stand beside it (l2.py). For the float32 kernels of RDNA, which have no tensor cores: the share
of multiply-adds that the compiler pairs, the vector instructions beside them in a turn of the loop, and, of the aligned
ones of gfx1100, the share of the time that paired multiply-adds alone would take. A model, not a GPU.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from tests.hip.executor import l2
from tests.hip.executor.call import call
from tests.hip.executor.code_object import Instruction
from tests.hip.executor.device import shipped
from tests.hip.executor.isa import hot_loop, instructions, invalidations, is_matrix, loops, registers, widths
from tests.hip.executor.kernel import Kernel
from tests.hip.executor.numbers import encode
from tests.hip.executor.occupancy import waves_that_fit
from tests.hip.executor.operators import ORDERS
from tests.hip.executor.schedule import simulate
from tests.hip.executor.table import Object, Row
from tests.hip.executor.waves import Grid
from wgrad.device.formats.frozen_weight import FrozenWeight, formats

_LATENCY, _ROUNDS = 600, 6  # clocks; rounds of the loop in the model, after two


def _format(name: str) -> type[FrozenWeight] | None:
    """Return the format of the weight that a kernel decodes."""
    return next((kind for kind in formats().values() if f"_{kind.format}" in name), None)


def _tile(name: str, cdna: bool) -> tuple[int, int, int]:
    """Rows, columns and threads of a work-group."""
    if name.startswith("gemv"):
        return 1, 4, 256
    if "skinny" in name:
        return 128, int(name.rpartition("_")[2]), 256
    if re.search("_f32_|_any_|_mix_|_split_", name):
        return 128, 128, 256 if cdna else 128
    if name.endswith("_big"):
        return (256, 256, 512) if cdna else (128, 128, 256)
    return (128, 128, 256) if cdna else (64, 128, 128)


def _dtypes(name: str) -> tuple[str, str]:
    """Return the dtypes of a and b that a kernel is run with."""
    if re.search("_any_|_mix_|skinny|^gemv$|gemv_unaligned", name):
        return ("f32", "bf16") if name.startswith("gemv") else ("bf16", "f32")
    if dense := re.match("gemm_split_(f32|f16)_bf16", name):
        return dense[1], "bf16"
    found = re.search("_(bf16|f16|f32)_", name)
    return (found[1], found[1]) if found else ("f32", "f32")


def _layout(name: str) -> str:
    found = re.search("_(nn|nt|tn|tt)(_|$)", name)
    return found[1] if found else "nt"


def _sizes(name: str, tile_m: int, tile_n: int) -> tuple[int, int, int]:
    """M, N, K that divide nothing that the kernel does not ask for."""
    unaligned = "unaligned" in name or "_any_" in name
    if name.startswith("gemv"):
        kind = _format(name)
        return 1, 131, 2083 if unaligned else 2080 + -2080 % kind.block if kind and kind.block > 1 else 2088
    if "skinny" in name:
        return tile_m + 40, tile_n - 8, 104
    return (tile_m + 37, 131, 83) if unaligned else (tile_m + (40 if _layout(name) == "tn" else 37), 136, 104)


def execute(kernel: Kernel) -> dict[str, float]:
    """Largest error against float64, relative to the largest result, for each order of waves."""
    rng, name = np.random.default_rng(0), kernel.name
    tile_m, tile_n, threads = _tile(name, kernel.lanes == 64)
    layout = _layout(name)
    m, n, k = _sizes(name, tile_m, tile_n)
    kind_a, kind_b = _dtypes(name)
    number = {"f32": np.int32(0), "f16": np.int32(1), "bf16": np.int32(2)}
    a, a_values = encode(rng.standard_normal((k, m) if layout[0] == "t" else (m, k)), kind_a)
    if kind := _format(name):
        full = rng.standard_normal((n, k) if layout == "nt" else (k, n)).astype(np.float32)
        weight = kind.quantize(full, double="nested" in name)
        values = weight.rows(0, full.shape[0], np.dtype(np.float32))
        b_values = values.astype(np.float64) if "split" in name else encode(values, kind_b)[1]
        operands = [*weight.arrays().values(), *map(np.int32, weight.parameters())]
        head = [a, *operands] + ([number[kind_a]] if kind_a == "f32" and "split" not in name else [])
    else:
        b, b_values = encode(rng.standard_normal((n, k) if layout[1] == "t" else (k, n)), kind_b)
        head = [a, b] + ([number[kind_a], number[kind_b]] if re.search("any|mix|skinny|gemv", name) else [])
    product = (a_values.T if layout[0] == "t" else a_values) @ (b_values.T if layout[1] == "t" else b_values)
    u, v, bias = (rng.standard_normal(s).astype(np.float32) for s in ((m, 5), (n, 5), (n,)))
    residual, before = rng.standard_normal((m, n)).astype(np.float16), rng.standard_normal((m, n)).astype(np.float32)
    want = 0.5 * product + u.astype(np.float64) @ v.T.astype(np.float64) + bias + residual + before
    numbers = [np.int32(x) for x in (m, n, k, 0, 5, 0, 1, 0, 0, 3)]
    arguments = [*head, before, bias, residual, u, v, *numbers, np.float32(0.5)]
    if not kind and not re.search("skinny|gemv", name):
        arguments += [np.int64(0), np.int64(0)]
    at = sum(isinstance(x, np.ndarray) for x in head)
    grid: Grid = -(-n // tile_n), -(-m // tile_m), 1
    errors: dict[str, float] = {}
    for order in ORDERS:
        got = call(kernel, grid, threads, arguments, order)[at]
        errors[order] = float(f"{np.abs(got - want).max() / np.abs(want).max():.2e}")
    return errors


def _multiply_adds(texts: list[str]) -> Counter[str]:
    return Counter(re.findall(r"(v_dual_fmac|v_fmac|v_fma)_", " ; ".join(texts)))


def multiply_add_loop(found: Sequence[Instruction]) -> list[str]:
    """The instructions of the loop that has the most multiply-adds; none where there is no such loop."""
    made = ([i.text for i in found[loop.first : loop.last + 1]] for loop in loops(found))
    best: list[str] = max(made, key=lambda texts: _multiply_adds(texts).total(), default=[])
    return best if _multiply_adds(best) else []


def without_tensor_cores(architecture: str, lanes: int, loop: list[str], most: int, *, modeled: bool) -> Row:
    """Return the row of a loop of multiply-adds.

    most: waves per SIMD that fit. modeled: whether to add the share of the peak.
    """
    count = _multiply_adds(loop)
    vector = sum(t.startswith("v_") and not _multiply_adds([t]) for t in loop)
    row: Row = {"dual_issued": round(count["v_dual_fmac"] / count.total(), 3), "vector_others": vector}
    if modeled:
        for key, l1 in ("peak_600", False), ("peak_600_l1", True):
            turns = _turns(architecture, lanes, loop, most, l1=l1, apart=True)  # a work-group has four waves
            row[key] = {waves: round(count.total() / 2 * waves / slots, 4) for waves, (slots, _) in turns.items()}
    return row


def _turns(
    architecture: str, lanes: int, loop: list[str], most: int, *, l1: bool, fetched: float = 0.0, apart: bool = False
) -> dict[int, tuple[float, float]]:
    """Return the slots of an iteration of the loop, and those with a busy tensor core, by waves per SIMD.

    The start of the loop does not count. most: waves per SIMD that fit. fetched: bytes from L2 for a load. apart:
    whether each wave is of another work-group.
    """
    turns = {}
    for waves in (n for n in (1, 2, 4) if n <= most):
        groups = waves if apart else 1
        start, whole = (
            simulate(architecture, lanes, [loop * n] * waves, _LATENCY, l1=l1, fetched=fetched, groups=groups)
            for n in (2, 2 + _ROUNDS)
        )
        turns[waves] = ((whole[0] - start[0]) / _ROUNDS, (whole[1] - start[1]) / _ROUNDS)
    return turns


def busy(
    architecture: str, lanes: int, loop: list[str], most: int, *, l1: bool = False, fetched: float = 0.0
) -> dict[int, float]:
    """Share of time that the tensor cores are busy in a loop, by waves a SIMD, of which `most` fit; without its start.
    fetched: bytes from L2 for a load."""
    turns = _turns(architecture, lanes, loop, most, l1=l1, fetched=fetched)
    return {waves: round(matrix / slots, 4) for waves, (slots, matrix) in turns.items()}


def with_l2(made: Object, name: str, lanes: int, loop: list[str], most: int) -> Row:
    """Add, for MI300's 16-bit GEMMs, the lines that L1 reads from L2 for 64 of K, and `busy` with those counted."""
    tile_m, tile_n, threads = tile = _tile(name, lanes == 64)
    waves = threads // lanes
    lines = l2.lines(made, name, tile, _format(name), groups=max(1, 4 * most // waves))
    depth = 16 * sum(map(is_matrix, loop)) * waves / (tile_m // 16 * (tile_n // 16))  # of K, in a turn
    loads = waves * sum(text.startswith(("global_load", "buffer_load")) for text in loop)
    fetched = lines * depth / 64 * l2.LINE / loads
    return {"lines_64": lines, "busy_600_l2": busy(made.architecture, lanes, loop, most, l1=True, fetched=fetched)}


def rows(made: Object, kernels: list[str], say: Callable[[str], None]) -> list[Row]:
    """A row for each kernel of a code object."""
    code, found = shipped(made.source, made.architecture), []
    for name in kernels:
        listing = instructions(code, name)
        row: Row = {"kernel": name, **registers(code, name), "invalidations": invalidations(listing)}
        loop = hot_loop(listing)
        group = code.kernels[name][".max_flat_workgroup_size"] // code.lanes(name)
        most = waves_that_fit(made.architecture, row["vgpr"], row["lds"], group)
        if loop:
            texts = [i.text for i in loop]
            row |= {"loop_instructions": len(loop), "matrix": sum(map(is_matrix, texts)), "widths": widths(loop)}
            row["busy_600"] = busy(made.architecture, code.lanes(name), texts, most)
            row["busy_600_l1"] = busy(made.architecture, code.lanes(name), texts, most, l1=True)
            if made.architecture == "gfx942" and name.endswith(("_big", "_small")):
                row |= with_l2(made, name, code.lanes(name), texts, most)
        elif adds := multiply_add_loop(listing):
            modeled = made == ("gfx1100", "gemm_f32") and "_any_" not in name
            row |= without_tensor_cores(made.architecture, code.lanes(name), adds, most, modeled=modeled)
        if not name.endswith("reduce"):
            row["error"] = execute(Kernel(code, name))
            say(f"{name}: {row['error']}")
        found.append(row)
    return found
