"""The compiled products: the committed table keeps its bars, and a few kernels are executed again from the sources."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wgrad.hip.runtime.build import CLANG, compile_source
from wgrad.hip.runtime.compile import KERNELS

BENCH = Path(__file__).parents[2] / "bench"
ROWS = [json.loads(line) for line in (BENCH / "results" / "hip_isa.jsonl").read_text().splitlines()]
TOOL = os.environ.get("WGRAD_RUN_HSACO")


def test_table_has_every_architecture() -> None:
    """gemm_split.hip is for gfx942 alone."""
    kernels = {a: {r["kernel"] for r in ROWS if r["arch"] == a} for a in ("gfx90a", "gfx942", "gfx1100", "gfx1201")}
    everywhere = {name for name in kernels["gfx942"] if "split" not in name}
    assert len(everywhere) == 59 and len(kernels["gfx942"]) == 71
    assert all(kernels[arch] == everywhere for arch in ("gfx90a", "gfx1100", "gfx1201"))


def test_nothing_spills() -> None:
    assert [(r["arch"], r["kernel"]) for r in ROWS if r["spills"] or r["scratch"]] == []


def test_executed_results_are_float32_sums() -> None:
    """float32 sums of ~100 products: 1e-6 of the largest. gfx90a's matrix unit takes float16 subnormals for zeros; two
    pieces of bfloat16 of either operand leave 2^-16 of each product."""
    for r in ROWS:
        limit = 1e-5 if r["arch"] == "gfx90a" and "f16" in r["kernel"] else 1e-6
        limit = 2**-15 if "split_nf4" in r["kernel"] and "_f32_" in r["kernel"] else limit
        assert max(r.get("error", {"none": 0.0}).values()) < limit, r


def test_few_kernels_are_beyond_the_executor() -> None:
    """Their twins, which are the same code for another type, are executed."""
    skipped = {r["kernel"] for r in ROWS if "not_executed" in r}
    executed = {r["kernel"] for r in ROWS if "error" in r}
    twins = [name.replace("_f16_", "_f32_" if "split" in name else "_bf16_") for name in skipped]
    assert all("_f16_" in name for name in skipped) and set(twins) <= executed


def test_matrix_unit_is_busy() -> None:
    """bf16 on gfx942, two waves a SIMD, 600 clocks of memory latency."""
    busy = {r["kernel"]: r["busy_600"]["2"] for r in ROWS if r["arch"] == "gfx942" and "busy_600" in r}
    assert min(busy[f"gemm_bf16_{layout}_big"] for layout in ("nn", "nt", "tn")) >= 0.75


def test_matrix_unit_is_busy_with_nf4() -> None:
    """Less than with 16-bit operands: decoding takes as many instructions as the rest of the loop. A double-quantised
    scale is rounded twice, as bitsandbytes does, which costs the lowest of them 2 points."""
    busy = {r["kernel"]: r["busy_600"]["2"] for r in ROWS if r["arch"] == "gfx942" and "busy_600" in r}
    names = [
        f"gemm_nf4{n}_{t}_{layout}_big" for n in ("", "_nested") for t in ("f16", "bf16") for layout in ("nn", "nt")
    ]
    assert min(busy[name] for name in names) >= 0.6


def test_loads_are_128_bits_wide() -> None:
    for r in ROWS:
        if r["kernel"].startswith(("gemm_bf16", "gemm_f16")) and "unaligned" not in r["kernel"]:
            assert list(r["widths"]["global_load"]) == ["global:128"], r


def test_multiply_adds_are_paired() -> None:
    pairs = {r["kernel"]: r["dual_issued"] for r in ROWS if r["arch"] == "gfx1100" and r.get("dual_issued") is not None}
    assert min(pairs[f"gemm_f32_{layout}"] for layout in ("nn", "nt", "tn")) >= 0.9


@pytest.mark.skipif(not TOOL or "TINYGRAD_DIR" not in os.environ, reason="$WGRAD_RUN_HSACO, $TINYGRAD_DIR are not set")
@pytest.mark.skipif(shutil.which(CLANG) is None, reason=f"{CLANG} is not installed")
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx1100"])
@pytest.mark.parametrize(
    "kernel",
    ["gemm_bf16_tn_small", "gemm_nf4_nested_f16_nt_small", "gemm_f32_nn", "gemm_skinny_tn_16", "gemv_nf4_nested"],
)
def test_executes(bench: Callable[[str], Any], tmp_path: Path, arch: str, kernel: str) -> None:
    sources = {"gemm_nf4": "linear"} | {name: name for name in ("gemv", "gemm_skinny", "gemm_f32", "gemm")}
    source = next(s for start, s in sources.items() if kernel.startswith(start))
    path = tmp_path / f"{source}.co"
    compile_source(KERNELS / f"{source}.hip", arch, path)
    errors = bench("hip_isa").execute(bench("hip_executor").tool(), path, kernel, arch.startswith("gfx9"))
    assert max(errors.values()) < (1e-5 if arch == "gfx90a" else 1e-6)
