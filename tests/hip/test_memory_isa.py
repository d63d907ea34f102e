"""The memory-bound kernels as compiled: the committed table keeps its bars and is what the sources give."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wgrad.hip.runtime.build import CLANG, compile_source
from wgrad.hip.runtime.compile import KERNELS, SHIPPED

BENCH = Path(__file__).parents[2] / "bench"
ROWS = [json.loads(line) for line in (BENCH / "results" / "hip_isa_memory.jsonl").read_text().splitlines()]
# What streams through large arrays; the others read a number here and there (positions, chains, block sums).
STREAMING = {
    "activation", "cross_entropy", "dropout", "elementwise", "embedding", "fill", "copy", "kv_append", "adamw",
    "grad_norm", "rms_norm", "rms_norm_wave", "rms_norm_row16", "rms_norm_backward", "rms_norm_backward_wave",
    "rms_norm_backward_row16", "rms_norm_dweight", "rope", "rope_append", "softmax", "softmax_backward", "sum_rows",
    "nf4_quantize", "nf4_dequantize", "embedding_backward", "sample",
}  # fmt: skip
# Kernels whose results are small beside what they read.
REDUCING = {"rms_norm_dweight", "sum_rows", "sample"}
# A scale for each block is read or written beside the codes, which are few bytes.
SHARE = {"nf4_quantize": 0.6, "nf4_dequantize": 0.45}


def moved(row: dict[str, Any], direction: str) -> list[tuple[str, int, int]]:
    """For each type of element: its name, bytes a lane in accesses of 64 bits or more, bytes in all."""
    found = []
    for name, counts in row["executed"].items():
        sizes = [(int(key.split()[1]), n) for key, n in counts.items() if key.startswith(direction)]
        found.append((name, sum(w * n for w, n in sizes if w >= 64), sum(w * n for w, n in sizes)))
    return found


def test_table_has_every_architecture() -> None:
    kernels = [{r["kernel"] for r in ROWS if r["arch"] == a} for a in SHIPPED]
    assert all(k == kernels[0] for k in kernels) and STREAMING <= kernels[0]
    assert {r["arch"] for r in ROWS if "executed" in r} == {"gfx90a", "gfx942", "gfx1100"}


def test_nothing_spills() -> None:
    assert [(r["arch"], r["kernel"]) for r in ROWS if r["spills"] or r["scratch"]] == []


def test_reductions_leave_lds_alone() -> None:
    """Lanes of a wave talk by DPP and through scalar registers."""
    assert [(r["arch"], r["kernel"]) for r in ROWS if r["lds_shuffles"]] == []


@pytest.mark.parametrize("direction", ["load", "store"])
def test_streams_are_wide(direction: str) -> None:
    """Four fifths of the bytes of a streaming kernel on aligned arrays go by 64 bits or more.

    An access counts as if all lanes made it: a number that few lanes write weighs as much as a stream.
    """
    rows = [r for r in ROWS if r["kernel"] in STREAMING and "executed" in r]
    if direction == "store":
        rows = [r for r in rows if r["kernel"] not in REDUCING]
    assert len(rows) >= 3 * 20
    narrow = [
        (r["arch"], r["kernel"], *m)
        for r in rows
        for m in moved(r, direction)
        if m[1] < SHARE.get(r["kernel"], 0.8) * m[2]
    ]
    assert narrow == []


def test_large_arrays_go_by_128_bits() -> None:
    """No load or store of another width at all in what only streams."""
    only = {
        "activation",
        "elementwise",
        "dropout",
        "embedding",
        "softmax",
        "softmax_backward",
        "copy",
        "kv_append",
        "adamw",
    }
    rows = [r for r in ROWS if r["kernel"] in only and "executed" in r]
    widths = {(r["arch"], r["kernel"], key) for r in rows for counts in r["executed"].values() for key in counts}
    assert {key for *_, key in widths} == {"load 128", "store 128"}, [w for w in widths if "128" not in w[2]]


@pytest.mark.skipif(
    not os.environ.get("WGRAD_RUN_HSACO") or "TINYGRAD_DIR" not in os.environ,
    reason="$WGRAD_RUN_HSACO, $TINYGRAD_DIR are not set",
)
@pytest.mark.skipif(shutil.which(CLANG) is None, reason=f"{CLANG} is not installed")
@pytest.mark.parametrize("arch", ["gfx942", "gfx1201"])
@pytest.mark.parametrize("source", ["norm", "quantize", "optimizer"])
def test_table_is_what_the_sources_give(bench: Callable[[str], Any], tmp_path: Path, arch: str, source: str) -> None:
    compile_source(KERNELS / f"{source}.hip", arch, tmp_path / f"{source}.co")
    report = bench("hip_table").inspector()
    table = {r["kernel"]: r for r in ROWS if r["arch"] == arch and r["source"] == source}
    for kernel in report.report(str(tmp_path / f"{source}.co"), None, 1)["kernels"]:
        row = table.pop(kernel["name"])
        assert (kernel["vgpr_total"], kernel["counts"]["instructions"]) == (row["vgpr"], row["instructions"])
    assert not table
