"""The compiled products: the committed table keeps its bars, and a few kernels are executed again."""

from __future__ import annotations

import pytest

from tests import tools
from tests.hip.executor.device import shipped
from tests.hip.executor.kernel import Kernel
from tests.hip.executor.products import execute
from tests.hip.executor.table import PRODUCTS, Row, digests, held, only
from tests.hip.executor.tinygrad_emulator import missing
from wgrad.hip.runtime.architectures import SHIPPED


def on_gfx942(row: Row) -> bool:
    return bool(row["arch"] == "gfx942")


def test_nothing_spills() -> None:
    with held("hip_isa") as rows:
        assert [(r["arch"], r["kernel"]) for r in rows if r["spills"] or r["scratch"]] == []


def test_executed_results_are_float32_sums() -> None:
    """float32 sums of ~100 products: 1e-6 of the largest. gfx90a's tensor cores take float16 subnormals for zeros; two
    pieces of bfloat16 of either operand leave 2^-16 of each product."""
    with held("hip_isa") as rows:
        for r in rows:
            limit = 1e-5 if r["arch"] == "gfx90a" and "f16" in r["kernel"] else 1e-6
            of_a_weight = "_split_" in r["kernel"] and "_bf16_" not in r["kernel"]
            limit = 2**-15 if of_a_weight and "_f32_" in r["kernel"] else limit
            assert max(r.get("error", {"none": 0.0}).values()) < limit, r


def test_every_kernel_was_executed() -> None:
    """Sums of pieces are made by a kernel of their own, which has no product."""
    with held("hip_isa") as rows:
        assert [(r["arch"], r["kernel"]) for r in rows if "error" not in r and not r["kernel"].endswith("reduce")] == []


# Two waves a SIMD, 600 clocks of memory latency, L1 counted.
_KEY, _WAVES = "busy_600_l1", "2"


def test_tensor_cores_are_busy() -> None:
    """Two operands of 16 bits, gfx942: 88 % by large tiles, 80 % by small ones."""
    with held("hip_isa", lambda r: on_gfx942(r) and r["source"] == "gemm") as rows:
        for size, least in ("big", 0.88), ("small", 0.8):
            names = [f"gemm_{t}_{layout}_{size}" for t in ("bf16", "f16") for layout in ("nn", "nt", "tn")]
            assert min(only(rows, name)[_KEY][_WAVES] for name in names) >= least


def test_lines_are_read_once() -> None:
    """Rows of 64 of K are lines: the two halves of each are loaded so close together that L1 still has it. With what L1
    reads from L2 counted, the bars hold as well."""
    with held("hip_isa", lambda r: on_gfx942(r) and r["source"] == "gemm") as rows:
        for size, lines, least in ("big", 512, 0.88), ("small", 256, 0.8):
            of = [r for r in rows if r["kernel"].endswith(size)]
            assert of and {r["lines_64"] for r in of} == {lines}
            assert min(r["busy_600_l2"][_WAVES] for r in of) >= least


def test_tensor_cores_are_busy_with_nf4() -> None:
    """Decoding stands beside single matrix instructions. It takes as long in a small tile, whose products are half."""
    with held("hip_isa", lambda r: on_gfx942(r) and r["source"] == "linear") as rows:
        for size, least in ("big", 0.8), ("small", 0.63):
            kinds = [(n, t, layout) for n in ("", "_nested") for t in ("f16", "bf16") for layout in ("nn", "nt")]
            names = [f"gemm_nf4{n}_{t}_{layout}_{size}" for n, t, layout in kinds]
            assert min(only(rows, name)[_KEY][_WAVES] for name in names) >= least


def test_no_loop_of_rdna_invalidates_a_cache() -> None:
    """Tiles go through LDS alone: a barrier for that keeps what the cache holds."""
    with held("hip_isa", lambda r: r["arch"].startswith("gfx1") and r["source"] in PRODUCTS) as rows:
        assert rows and [(r["arch"], r["kernel"]) for r in rows if r["invalidations"]] == []


def test_loads_are_128_bits_wide() -> None:
    with held("hip_isa") as rows:
        for r in rows:
            if r["kernel"].startswith(("gemm_bf16", "gemm_f16")) and "unaligned" not in r["kernel"]:
                assert list(r["widths"]["global_load"]) == ["global:128"], r


_F32 = [f"gemm_f32_{layout}" for layout in ("nn", "nt", "tn")]


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201"])
def test_multiply_adds_are_paired(arch: str) -> None:
    """Beside a thousand pairs: the addresses in LDS of the two buffers in turn, and none in global memory."""
    with held("hip_isa", lambda r: r["arch"] == arch and r["source"] == "gemm_f32") as rows:
        assert min(only(rows, name)["dual_issued"] for name in _F32) >= 0.95
        assert max(only(rows, name)["vector_others"] for name in _F32) <= 20


def test_paired_multiply_adds_take_most_of_the_time() -> None:
    with held("hip_isa", lambda r: r["arch"] == "gfx1100" and r["source"] == "gemm_f32") as rows:
        assert min(only(rows, name)["peak_600"]["4"] for name in _F32) >= 0.9
        assert min(only(rows, name)["peak_600_l1"]["4"] for name in _F32) >= 0.9


@pytest.mark.executor
@pytest.mark.parametrize("arch", SHIPPED)
@pytest.mark.parametrize(
    "kernel",
    ["gemm_bf16_tn_small", "gemm_nf4_nested_f16_nt_small", "gemm_f32_nn", "gemm_skinny_tn_16", "gemv_nf4_nested"],
)
def test_executed_kernels_give_the_product(arch: str, kernel: str) -> None:
    if lacking := missing(arch):
        tools.give_up(lacking)
    (code,) = (code for s in PRODUCTS if (arch, s) in digests() and kernel in (code := shipped(s, arch)).kernels)
    errors = execute(Kernel(code, kernel))
    assert max(errors.values()) < (1e-5 if arch == "gfx90a" else 1e-6)
