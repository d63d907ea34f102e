"""Launches in several dispatches: every workgroup once, the same bits, and none that is longer than was asked for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.wgsl.launches import same_bits_in_parts
from wgrad.autograd.bind import bind
from wgrad.autograd.selftest.attention import attention_case
from wgrad.autograd.selftest.case import F32, Case
from wgrad.autograd.selftest.cases import cases
from wgrad.autograd.selftest.int8 import int8_cases
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.gemm import gemm_tile
from wgrad.wgsl.gemm.gemm_tile import Tile
from wgrad.wgsl.runtime.dispatch_parts import range_parts, tile_parts


@pytest.mark.parametrize("count", [1, 2, 7, 100])
@pytest.mark.parametrize("work", [1.0, 10.0, 10.1, 35.0, 5000.0])
def test_a_range_is_covered_once(count: int, work: float) -> None:
    parts = range_parts(count, work, 10.0, 2.0)
    assert [i for first, end in parts for i in range(first, end)] == list(range(count))
    if work <= 10.0:
        assert len(parts) == 1
    else:
        assert all(end - first == 1 or 2.0 * work * (end - first) / count <= 10.0 for first, end in parts)


@pytest.mark.parametrize("groups", [(1, 1, 1), (5, 1, 2), (1, 9, 1), (501, 2, 1), (6, 7, 3)])
@pytest.mark.parametrize("work", [1.0, 10.1, 35.0, 5000.0])
def test_a_grid_is_covered_once(groups: tuple[int, int, int], work: float) -> None:
    parts = tile_parts(groups, work, 10.0)
    tiles = [(x, y) for x0, y0, nx, ny in parts for y in range(y0, y0 + ny) for x in range(x0, x0 + nx)]
    assert sorted(tiles) == [(x, y) for x in range(groups[0]) for y in range(groups[1])]
    share = work / (groups[0] * groups[1])
    assert all(nx * ny == 1 or share * nx * ny <= 10.0 for _, _, nx, ny in parts)
    assert work > 10.0 or len(parts) == 1


def named(found: list[Case], *names: str) -> list[Case]:
    return [next(case for case in found if name in case.name) for name in names]


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(
    "case",
    named(cases(), "gemm_nn/plain/128x128x64", "gemm_nt/epilogue/70x131x72", "gemm_tn/accumulate/37x41x67")
    + named(cases(), "linear_nf4/epilogue double/70x131x72"),
    ids=lambda case: case.name,
)
def test_matmuls_in_parts_have_the_same_bits(
    case: Case, tiled: bool, wgpu_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm_tile, "MAIN", Tile(32, 32, 8, 1, 1))
    device = bind(WgpuDevice)()
    device.software = not tiled
    same_bits_in_parts(case, device, monkeypatch, "gemm" if tiled else "gemm_direct")


def test_matmuls_of_8_bits_in_parts_have_the_same_bits(wgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = bind(WgpuDevice)()
    device.round_products()
    case = next(case for case in int8_cases(device.float16) if "nf4" in case.name)
    same_bits_in_parts(case, device, monkeypatch, "gemm_int8")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("window", [0, 61])
def test_attention_in_parts_has_the_same_bits(
    wgpu_device: Any, monkeypatch: pytest.MonkeyPatch, backward: bool, window: int
) -> None:
    case = attention_case("parts", (2, 133, 4, 2, 20), F32, documents=3, window=window, backward=backward)
    shaders = ("attention_backward_dq", "attention_backward_dkv") if backward else ("attention",)
    same_bits_in_parts(case, wgpu_device, monkeypatch, *shaders)
