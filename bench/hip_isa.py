"""What the compiled products do: executed instruction by instruction against float64, and counted.

    WGRAD_RUN_HSACO=.../run_hsaco.py TINYGRAD_DIR=.../tinygrad python bench/hip_isa.py [--arch gfx942] [--only nt_big]

Every kernel of hip/gemm*.hip and hip/kernels/gemv.hip runs at a size that divides nothing, waves forward and reversed
(run_hsaco.py; not gfx1201, whose matrix instructions it does not execute); isa_report.py, beside it, gives registers,
spills, widths of accesses, the share of time the matrix unit is busy at 600 clocks of memory latency, by waves a SIMD,
and for the float32 kernels of RDNA the share of multiply-adds that the compiler pairs. Rows go to
bench/results/hip_isa.jsonl. A model, not a card.
"""

from __future__ import annotations

import collections
import re
from pathlib import Path
from typing import Any

import hip_table
import numpy as np

OUT = Path(__file__).parent / "results" / "hip_isa.jsonl"
SOURCES = ("gemm", "linear", "gemm_f32", "gemm_split", "gemm_skinny", "gemv")
CODE = np.array(
    "-1 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334"
    " -0.09105003625154495 0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171229224"
    " 0.44070982933044434 0.5626170039176941 0.7229568362236023 1".split(),
    np.float32,
)


def nf4(rng: np.random.Generator, shape: tuple[int, int], nested: bool) -> tuple[list[Any], np.ndarray]:
    """Kernel arguments of a random NF4 weight, and its values in float32."""
    codes = rng.integers(0, 16, shape).astype(np.uint8).ravel()
    packed = (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)
    blocks = -(-codes.size // 64)
    absmax: np.ndarray = rng.random(blocks).astype(np.float32)
    extra: list[Any] = [None, None, None]
    scale = absmax
    if nested:
        absmax = rng.integers(0, 256, blocks).astype(np.uint8)
        outer = rng.random(-(-blocks // 256)).astype(np.float32) + np.float32(0.5)
        table, offset = np.sort(rng.standard_normal(256)).astype(np.float32), np.array([0.3], np.float32)
        extra = [outer, table, offset]
        scale = table[absmax] * np.repeat(outer, 256)[:blocks] + offset
    values = (CODE[codes] * np.repeat(scale, 64)[: codes.size].astype(np.float32)).reshape(shape)
    return [packed, absmax, *extra, np.int32(6), np.int32(8)], values


def tile_of(name: str, cdna: bool) -> tuple[int, int, int]:
    """Rows, columns and threads of a work-group."""
    if name.startswith("gemv"):
        return 1, 4, 256
    if "skinny" in name:
        return 128, int(name.rpartition("_")[2]), 256
    if re.search("_f32_|_any_|_mix_|_split_", name):
        return 128, 128, 256
    if name.endswith("_big"):
        return (256, 256, 512) if cdna else (128, 128, 256)
    return (128, 128, 256) if cdna else (64, 128, 128)


def kinds_of(name: str) -> tuple[str, str]:
    """Dtypes of a and b that a kernel is run with."""
    if re.search("_any_|_mix_|skinny|^gemv$|gemv_unaligned", name):
        # Not float16 here: the executor takes a 16-bit source above v127 for the upper half of another register.
        return ("f32", "bf16") if name.startswith("gemv") else ("bf16", "f32")
    if dense := re.match("gemm_split_(f32|f16)_bf16", name):
        return dense[1], "bf16"
    found = re.search("_(bf16|f16|f32)_", name)
    return (found[1], found[1]) if found else ("f32", "f32")


def sizes_of(name: str, layout: str, tile_m: int, tile_n: int) -> tuple[int, int, int]:
    """M, N, K that divide nothing that the kernel does not ask for."""
    loose = "unaligned" in name or "_any_" in name
    if name.startswith("gemv"):
        return 1, 131, 2083 if loose else 2088
    if "skinny" in name:
        return tile_m + 40, tile_n - 8, 104
    return (tile_m + 37, 131, 83) if loose else (tile_m + 40 if layout == "tn" else tile_m + 37, 136, 104)


def execute(tool: Any, path: Path, name: str, cdna: bool) -> dict[str, float]:
    """Largest error relative to the largest result, for each order of waves."""
    rng = np.random.default_rng(0)
    tile_m, tile_n, threads = tile_of(name, cdna)
    found = re.search("_(nn|nt|tn|tt)(_|$)", name)
    layout = found[1] if found else "nt"
    m, n, k = sizes_of(name, layout, tile_m, tile_n)
    kind_a, kind_b = kinds_of(name)
    numbers_of = {"f32": np.int32(0), "f16": np.int32(1), "bf16": np.int32(2)}
    a, a_values = hip_table.encode(rng.standard_normal((k, m) if layout[0] == "t" else (m, k)), kind_a, tool)
    if "nf4" in name:
        operands, values = nf4(rng, (n, k) if layout == "nt" else (k, n), "nested" in name)
        b_values = values.astype(np.float64) if "split" in name else hip_table.encode(values, kind_b, tool)[1]
        head = [a, *operands] + ([numbers_of[kind_a]] if kind_a == "f32" and "split" not in name else [])
    else:
        b, b_values = hip_table.encode(rng.standard_normal((n, k) if layout[1] == "t" else (k, n)), kind_b, tool)
        head = [a, b] + ([numbers_of[kind_a], numbers_of[kind_b]] if re.search("any|mix|skinny|gemv", name) else [])
    product = (a_values.T if layout[0] == "t" else a_values) @ (b_values.T if layout[1] == "t" else b_values)
    u, v, bias = (rng.standard_normal(s).astype(np.float32) for s in ((m, 5), (n, 5), (n,)))
    residual, before = rng.standard_normal((m, n)).astype(np.float16), rng.standard_normal((m, n)).astype(np.float32)
    want = 0.5 * product + u.astype(np.float64) @ v.T.astype(np.float64) + bias + residual + before
    numbers = [np.int32(x) for x in (m, n, k, 0, 5, 0, 1, 0, 0, 3)]
    arguments = [*head, before, bias, residual, u, v, *numbers, np.float32(0.5)]
    if not re.search("nf4|skinny|gemv", name):
        arguments += [np.int64(0), np.int64(0)]
    at = sum(isinstance(x, np.ndarray) for x in head)
    grid, errors = (-(-n // tile_n), -(-m // tile_m), 1), {}
    for order in ("fwd", "rev"):
        got = tool.run(str(path), name, grid, (threads, 1, 1), arguments, order=order)[at]
        errors[order] = float(f"{np.abs(got - want).max() / np.abs(want).max():.2e}")
    return errors


def dual_issued(report: Any, code: Any, name: str) -> float | None:
    """Share of the multiply-adds of the largest loop that are issued in pairs."""
    instructions = report.trim(report.kernel_listing(code, name))
    index = {address: i for i, (address, _, _) in enumerate(instructions)}
    best = collections.Counter[str]()
    for i, (address, text, _) in enumerate(instructions):
        target = report.branch_target(address, text)
        if target in index and target <= address:
            body = " ; ".join(t for _, t, _ in instructions[index[target] : i + 1])
            found = collections.Counter(re.findall(r"(v_dual_fmac|v_fmac|v_fma)_", body))
            best = max(best, found, key=lambda c: c.total())
    return round(best["v_dual_fmac"] / best.total(), 3) if best.total() else None


def row(tool: Any, report: Any, path: Path, arch: str, kernel: dict[str, Any]) -> dict[str, Any]:
    name, loop = kernel["name"], kernel.get("hot_loop", {})
    result, code = hip_table.registers(arch, kernel), tool.CodeObject(str(path))
    unread = False
    if loop:
        result |= {"loop_instructions": loop["instructions"], "matrix": loop["matrix"], "widths": loop["widths"]}
        hot = int(loop["start"], 16), int(loop["end"], 16)
        unread = "_any_" not in name and hip_table.beyond_the_executor(report, code, name, within=hot)
        result["busy_600"] = {n: model["matrix_utilisation"] for n, model in loop["model"].items()}
    elif not name.endswith("reduce"):
        result["dual_issued"] = dual_issued(report, code, name)
    if unread:
        result["not_executed"] = hip_table.NOT_EXECUTED
    elif arch in hip_table.EXECUTED and not name.endswith("reduce"):
        result["error"] = execute(tool, path, name, arch.startswith("gfx9"))
    return result


if __name__ == "__main__":
    hip_table.main(__doc__, OUT, SOURCES, row)
