"""Launches in several dispatches: every workgroup once, the same bits, and none that is longer than was asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.case_results import assert_case
from tests.wgsl.launches import launched, same_bits_in_parts
from wgrad.autograd.bind import bind
from wgrad.autograd.selftest.attention import attention_case
from wgrad.autograd.selftest.case import F32, Case
from wgrad.autograd.selftest.cases import cases
from wgrad.autograd.selftest.int8 import int8_cases
from wgrad.autograd.selftest.selective_scan import scan_case
from wgrad.device.formats.frozen_weight import formats
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.gemm import gemm_tile
from wgrad.wgsl.gemm.gemm_tile import Tile
from wgrad.wgsl.runtime import runtime
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


@pytest.mark.parametrize(
    "case", named(cases(), "lora_du/stack of 3/131", "lora_db/stack of 3/131"), ids=lambda c: c.name
)
def test_gradients_of_lora_in_parts_have_the_same_bits(
    case: Case, wgpu_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_bits_in_parts(case, wgpu_device, monkeypatch, "gemm_skinny")


@pytest.mark.parametrize(("back", "last"), [(False, "output"), (True, "grads")])
def test_a_selective_scan_in_parts_has_the_same_bits(
    back: bool, last: str, wgpu_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where launches have more than one row of workgroups, too."""
    monkeypatch.setattr(runtime, "MAX_GROUPS", 7)
    case = scan_case("parts", (2, 70, 37, 8), F32, back)
    assert_case(case, wgpu_device)
    shaders = (f"selective_scan_{name}" for name in ("ends", "carry", last))
    same_bits_in_parts(case, wgpu_device, monkeypatch, *shaders)


def test_gradients_of_a_table_in_parts_have_the_same_bits(wgpu_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.random.default_rng(0).integers(0, 300, 700).astype(np.int32)
    dy = np.random.default_rng(1).standard_normal((700, 5)).astype(np.float32)

    def backward() -> np.ndarray:
        given = {"dy": wgpu_device.upload(dy), "ids": wgpu_device.upload(ids)}
        return np.asarray(wgpu_device.download(wgpu_device.embedding_backward(**given, vocab_size=311)))

    groups, fold = list[int](), wgpu_device.groups

    def noted(items: int, per_group: int) -> Any:
        groups.append(-(-items // per_group))
        return fold(items, per_group)

    with monkeypatch.context() as patch:  # first: a later run would find the links of this one in the same memory
        names = launched(wgpu_device, patch)
        patch.setattr(wgpu_device, "groups", noted)
        patch.setattr(wgpu_device._submission_size, "dispatch_work", 1.0)
        parts = backward()
    assert names.count("embedding_backward") == 4  # three of 256 tokens, and the sums
    assert groups[1:4] == [1, 1, 1], "a dispatch has workgroups of others"  # after those that write zeros
    whole = backward()
    assert parts.tobytes() == whole.tobytes()
    expected = np.zeros((311, 5), np.float32)
    np.add.at(expected, ids, dy)
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["q4_0", "q5_0", "q4_k", "q6_k"])
def test_rounded_weights_in_parts_have_the_same_bits(
    name: str, poisoned_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of 2^15 values, at which the arrays of every format begin at a multiple of 256 bytes.

    On the shaders of test_memory_ops.py.
    """
    w = np.random.default_rng(2).standard_normal((99, 768)).astype(np.float32)

    def rounded() -> list[bytes]:
        kind: Any = formats()[name]
        weight = kind.empty(w.shape, poisoned_device.empty)
        poisoned_device.round_weight(poisoned_device.upload(w), weight)
        return [poisoned_device.download(array).tobytes() for array in weight.arrays().values()]

    whole = rounded()
    names = launched(poisoned_device, monkeypatch)
    monkeypatch.setattr(poisoned_device._submission_size, "dispatch_work", 1.0)
    assert rounded() == whole and len(names) == 3


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
