"""Self-test cases of gemm."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgrad.autograd.selftest.case import BF16, F16, F32, Case, Inputs, Outputs, dtype_name, normal
from wgrad.device.contract import Device


def gemm_case(
    variant: str,
    m: int,
    n: int,
    k: int,
    a_dtype: Any,
    b_dtype: Any = None,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    batch: int = 0,
    alpha: float = 1.0,
    bias: bool = False,
    residual: Any = None,
    rank: int = 0,
    accumulate: Any = None,
    dtype: Any = None,
) -> Case:
    """Return a case of a GEMM. `residual` and `accumulate` are the dtypes of these arguments."""
    b_dtype = a_dtype if b_dtype is None else b_dtype
    lead = (batch,) if batch else ()

    def build(rng: np.random.Generator) -> Inputs:
        inputs: Inputs = {
            "a": normal(rng, (*lead, k, m) if trans_a else (*lead, m, k), a_dtype),
            "b": normal(rng, (*lead, n, k) if trans_b else (*lead, k, n), b_dtype),
        }
        if bias:
            inputs["bias"] = normal(rng, (n,))
        if residual is not None:
            inputs["residual"] = normal(rng, (m, n), residual)
        if rank:
            inputs["u"] = normal(rng, (m, rank))
            inputs["v"] = normal(rng, (n, rank) if trans_b else (rank, n))
        if accumulate is not None:
            inputs["out"] = normal(rng, (*lead, m, n), accumulate)
        return inputs

    def call(device: Device, x: Inputs) -> Outputs:
        options = {"trans_a": trans_a, "trans_b": trans_b, "alpha": alpha, "dtype": dtype}
        more = {n: x[n] for n in ("bias", "residual", "out") if n in x}
        lowrank, add = (x["u"], x["v"]) if rank else None, accumulate is not None
        return {"y": device.gemm(x["a"], x["b"], **options, **more, lowrank=lowrank, accumulate=add)}

    form = ("t" if trans_a else "n") + ("t" if trans_b else "n")
    shape = f"{'x'.join(map(str, (*lead, m, n, k)))}"
    dtypes = dtype_name(a_dtype) + ("" if b_dtype == a_dtype else f"*{dtype_name(b_dtype)}")
    # The CPU's sums consist of many short ones; a device may add all k terms in sequence.
    ulps = 4 + k**0.5 / 4
    return Case(f"gemm_{form}/{variant}/{shape}/{dtypes}", "gemm", "forward", dtypes, shape, build, call, ulps)


def skinny_cases(t: np.dtype) -> list[Case]:
    """Return cases of LoRA's GEMMs, with a side of at most 64, in every form that has a kernel of its own."""
    u: dict[str, Any] = {"alpha": 0.37, "dtype": F32}
    return [
        gemm_case("skinny u", 131, 16, 292, t, F32, trans_b=True, **u),
        gemm_case("skinny u", 70, 50, 68, t, F32, trans_b=True, **u),
        gemm_case("skinny u", 17, 5, 1028, t, F32, trans_b=True, **u),
        gemm_case("skinny du", 131, 16, 292, t, F32, **u),
        gemm_case("skinny du", 67, 64, 132, t, F32, **u),
        gemm_case("skinny da", 16, 292, 131, F32, t, trans_a=True, accumulate=F32, alpha=0.37),
        gemm_case("skinny da", 50, 132, 515, F32, t, trans_a=True, accumulate=F32),
        gemm_case("skinny db", 292, 16, 131, t, F32, trans_a=True, accumulate=F32, alpha=0.37),
        gemm_case("skinny db", 68, 64, 515, t, F32, trans_a=True, dtype=F32),
    ]


def cases(t: np.dtype) -> list[Case]:
    found = skinny_cases(t)
    found += [
        gemm_case("plain", m, n, k, t, trans_a=ta, trans_b=tb)
        for ta, tb in ((False, False), (False, True), (True, False), (True, True))
        for m, n, k in ((41, 123, 67), (128, 128, 64))
    ]
    found += [
        gemm_case("batched", 17, 29, 31, t, batch=3),
        gemm_case("batched", 17, 29, 31, t, batch=3, trans_b=True),
        gemm_case("batched", 17, 29, 31, t, batch=3, trans_a=True),
        gemm_case("row", 1, 123, 67, t, trans_b=True),
        gemm_case("row", 1, 256, 128, t, trans_b=True, bias=True),
        gemm_case("few rows", 3, 130, 72, t, trans_b=True),
        gemm_case("few rows", 8, 35, 1003, t, trans_b=True, alpha=0.37, rank=5),
        gemm_case("sixteen rows", 16, 130, 516, t, trans_b=True, accumulate=F32, dtype=F32),
        gemm_case("column", 41, 1, 67, t, trans_b=True),
        gemm_case("inner 1", 41, 37, 1, t),
        gemm_case("long inner", 9, 35, 1003, t, trans_b=True),
        gemm_case("tiles", 259, 133, 130, t, trans_b=True),
        gemm_case("alpha", 41, 37, 67, t, trans_b=True, alpha=0.37),
        gemm_case("bias", 41, 37, 67, t, trans_b=True, bias=True),
        gemm_case("residual", 41, 37, 67, t, trans_b=True, residual=t),
        gemm_case("lowrank", 41, 37, 67, t, trans_b=True, rank=5),
        gemm_case("lowrank", 41, 37, 67, t, rank=16),
        gemm_case("lowrank", 128, 128, 64, t, trans_b=True, rank=5),
        gemm_case("epilogue", 70, 131, 72, t, trans_b=True, alpha=0.37, bias=True, residual=F32, rank=8, dtype=F32),
        gemm_case("accumulate", 37, 41, 67, t, trans_a=True, accumulate=F32, dtype=F32),
        gemm_case("accumulate alpha", 16, 576, 129, t, trans_a=True, accumulate=F32, dtype=F32, alpha=1.7),
        gemm_case("bfloat16", 41, 123, 67, t, BF16, trans_b=True),
        gemm_case("bfloat16", 41, 122, 68, t, BF16),
        gemm_case("bfloat16 row", 1, 123, 68, t, BF16, trans_b=True, dtype=F32),
    ]
    if t == F16:
        found += [
            gemm_case("mixed", 41, 37, 67, F16, F32, trans_b=True, dtype=F32),
            gemm_case("mixed", 41, 37, 67, F32, F16, dtype=F16),
            gemm_case("mixed", 41, 37, 67, F32, F16, trans_a=True, dtype=F32),
            gemm_case("mixed, default dtype", 41, 37, 67, F16, F32, trans_b=True),
            gemm_case("mixed, default dtype", 41, 37, 67, F32, F16),
            gemm_case("mixed, default dtype", 17, 29, 31, F16, F32, batch=3),
            gemm_case("mixed, default dtype", 9, 35, 1003, F16, F32, trans_b=True, rank=5),
            gemm_case("mixed, default dtype", 41, 37, 67, F16, BF16, trans_b=True),
            gemm_case("accumulate, default dtype", 37, 41, 67, F16, F32, trans_a=True, accumulate=F32),
            gemm_case("lora u", 41, 8, 67, F16, F32, trans_b=True, alpha=2.0, dtype=F32),
            gemm_case("residual float32", 41, 37, 67, F16, trans_b=True, residual=F32, dtype=F32),
        ]
    return found
