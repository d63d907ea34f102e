"""Mixture of experts on wgpu: the bounds of its launches, and rows of few tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.wgsl.launches import same_bits_in_parts
from wgrad.autograd.selftest.case import F16, F32, Case
from wgrad.autograd.selftest.experts import cases, grouped_case
from wgrad.autograd.selftest.run import check_case
from wgrad.wgsl.gemm import gemm_matrix
from wgrad.wgsl.gemm.gemm_matrix import MatrixTile
from wgrad.wgsl.gemm.gemm_tile import FEW_REGISTERS, FLAT_SKINNY, MAIN, SMALL, TALL_SKINNY
from wgrad.wgsl.gemm.plan import Gemm, Limits
from wgrad.wgsl.moe import grouped


@pytest.mark.parametrize(("direction", "shader"), [("forward", "gemm"), ("weight_grad", "moe_weight_grad")])
def test_launches_in_parts(direction: str, shader: str, wgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = grouped_case(direction, "parts", (131, 5, 2, 136, 72), F32, gather=True)
    same_bits_in_parts(case, wgpu_device, monkeypatch, shader)


ON_TENSOR_CORES = [case for case in cases(F16) if "eights" in case.name]


@pytest.mark.parametrize("case", ON_TENSOR_CORES, ids=lambda case: case.name)
def test_on_tensor_cores(case: Case, matrix_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small, narrow = MatrixTile(2, 1, 1, 2, 1, ahead=True), MatrixTile(1, 2, 1, 1, 1, 64, ahead=True)
    monkeypatch.setattr(gemm_matrix, "WEIGHT_TILES", dict.fromkeys((8, 16), (small,)))
    monkeypatch.setattr(gemm_matrix, "NARROW", narrow)
    result = check_case(case, matrix_device)
    assert result.ok, f"{result.output} is off by {result.error:.3g}, allowed {result.limit:.3g}"
    assert "gemm_matrix" in matrix_device.launched and "gemm" not in matrix_device.launched


def test_tiles() -> None:
    """By the rows that an expert has on average."""
    found = [grouped.choose_tile(mean, n) for mean, n in ((4, 8), (4, 512), (40, 512), (128, 512), (512, 512))]
    assert found[:3] + found[4:] == [TALL_SKINNY, FLAT_SKINNY, SMALL, MAIN]
    assert (found[3].m, found[3].n) == (64, 128)
    few = [grouped.choose_tile(mean, n, few_registers=True) for mean, n in ((40, 512), (128, 512), (512, 512))]
    assert few == [SMALL, FEW_REGISTERS, FEW_REGISTERS]
    weights = Gemm((65536, 1536, 2048), "float16", "float16", "float16", trans_b=True)
    assert grouped.plan_experts(weights, 128, Limits(32 << 10, few_registers=True)).tile == FEW_REGISTERS
    cores = Limits(48 << 10, 1 << 30, False, True)
    for rows, tile in ((1024, (16, 64)), (16384, (64, 128)), (65536, (128, 64))):
        plan = grouped.plan_experts(Gemm((rows, 1536, 2048), "float16", "float16", "float16", trans_b=True), 128, cores)
        assert isinstance(plan.tile, MatrixTile) and (plan.tile.m, plan.tile.n) == tile
