"""Self-test cases of GEMMs that first transpose their left operand, as large ones do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from wgrad.autograd.selftest.case import BF16, F16, F32, Case, Inputs, Outputs, switched
from wgrad.autograd.selftest.gemm import gemm_case
from wgrad.autograd.selftest.linear import frozen_case
from wgrad.device.contract import Device


def transposed_cases(float16: bool) -> list[Case]:
    """Return the cases for devices that have such GEMMs: with and without edge tiles, and with epilogues."""
    added: dict[str, Any] = {"residual": F32, "rank": 5, "alpha": 0.37}
    found = [
        gemm_case("transposed", 131, 67, 75, F32, **added, bias=True),
        gemm_case("transposed", 128, 64, 48, F32, trans_b=True),
        gemm_case("transposed", 33, 130, 301, F32, BF16, trans_b=True, accumulate=F32),
        frozen_case("nf4", "transposed", 133, 72, 136, F32, double=True, rank=16, residual=F32),
        frozen_case("nf4", "transposed", 133, 136, 72, F32, double=True, backward=True, rank=16),
    ]
    if float16:
        found.append(gemm_case("transposed", 131, 66, 75, F16))
        found.append(frozen_case("q8_0", "transposed", 67, 72, 96, F16, backward=True))
    return [_transposed(case) for case in found]


def _transposed(case: Case) -> Case:
    def call(device: Device, x: Inputs) -> Outputs:
        with switched(device, "transposes_left", True):
            return case.call(device, x)

    return replace(case, call=call)
