"""Subgroups of kernels on tensor cores: which are found on a device, and that their variants differ."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.wgsl.matrix_emulation import LANES, OTHER_SHAPES
from wgrad.autograd.selftest.attention import attention_case
from wgrad.autograd.selftest.case import F16, Case
from wgrad.autograd.selftest.matrix import product_cases, skinny_cases
from wgrad.autograd.selftest.run import check_case
from wgrad.device.errors import DeviceError
from wgrad.wgsl.gemm import gemm_matrix, gemm_matrix_skinny
from wgrad.wgsl.gemm.gemm_matrix_skinny import SkinnyTile
from wgrad.wgsl.runtime import compile as wgsl_compile
from wgrad.wgsl.runtime import cooperative, matrix_units
from wgrad.wgsl.runtime.cooperative_shapes import BLOCK, Shape

ROOT = Path(__file__).parents[2]


def fresh(device: Any, monkeypatch: pytest.MonkeyPatch, change: Any = str) -> None:
    """Pipelines of this test alone. change: of each assembled text."""
    assemble = wgsl_compile.assemble
    monkeypatch.setattr(wgsl_compile, "assemble", lambda *given: change(assemble(*given)))
    monkeypatch.setattr(device, "_compiler", wgsl_compile.Compiler(device._device))


@pytest.mark.parametrize(("shape", "lanes"), [*((BLOCK, n) for n in LANES), *zip(OTHER_SHAPES, LANES)], ids=str)
def test_the_probe_finds_the_lanes(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch, lanes: int, shape: Shape
) -> None:
    monkeypatch.setattr(matrix_device, "lanes", lanes)
    monkeypatch.setattr(matrix_device, "matrix_shape", shape)
    fresh(matrix_device, monkeypatch)
    assert cooperative.lanes_of(matrix_device) == lanes


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("let subgroup_size = 32u", "let subgroup_size = 128u", "subgroups of 128"),
        ("let subgroup_id = lid / 32u", "let subgroup_id = lid % 2u", "in order"),
        ("let subgroup_invocation_id = lid % 32u", "let subgroup_invocation_id = lid / 2u", "in order"),
        ("let ld = 4u", "let ld = 0u", "elements of a 16x16x16 matmul are wrong"),  # Mesa 25.0.7, of a struct's member
        ("one += (*a)", "one = f32(k) + (*a)", "elements of a 16x16x16 matmul are wrong"),
    ],
)
def test_the_probe_refuses_what_no_kernel_is_for(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch, old: str, new: str, said: str
) -> None:
    def change(text: str) -> str:
        assert old in text or "subgroup_size" not in text
        return text.replace(old, new)

    fresh(matrix_device, monkeypatch, change)
    with pytest.raises(DeviceError, match=said):
        cooperative.lanes_of(matrix_device)


PRODUCT = next(c for c in product_cases() if c.name.startswith("gemm_nn/plain") and "medium" in c.name)
SKINNY = next(c for c in skinny_cases() if c.shape == "208x16x624")
ATTENTION = attention_case("grouped", (2, 70, 6, 2, 32), F16)


@pytest.mark.parametrize("case", [PRODUCT, SKINNY, ATTENTION], ids=lambda case: case.name)
def test_subgroups_counted_as_others_than_the_drivers_are_wrong(
    matrix_device: Any, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """By 32 lanes where there are 64, as every kernel did before RADV was met: the self-test says so."""
    monkeypatch.setattr(gemm_matrix, "MEDIUM", gemm_matrix.MatrixTile(2, 1, 1, 2, 1))
    monkeypatch.setattr(gemm_matrix_skinny, "_tiles", lambda product: (SkinnyTile(4, 2, 1, 32, 2),))
    monkeypatch.setattr(matrix_device, "lanes", 64)
    for counted, right in ((64, True), (32, False)):

        def change(text: str, counted: int = counted) -> str:
            return text.replace("let subgroup_id = lid / 64u", f"let subgroup_id = lid / {counted}u")

        with monkeypatch.context() as changed:
            fresh(matrix_device, changed, change)
            assert check_case(case, matrix_device).ok == right


@pytest.mark.parametrize(
    "checked, found, off",
    [(64, 64, ""), (0, 16, ""), (32, 64, "have 64 lanes, and had 32 when checked"), (32, 0, "no variant")],
)
def test_only_variants_that_were_checked_are_used(
    wgpu_device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: int, found: int, off: str
) -> None:
    def probe(device: Any) -> int:
        if not found:
            raise DeviceError("no variant")
        return found

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    monkeypatch.setattr(cooperative, "lanes_of", probe)
    matrix_units.keep_verdict("a card", True, "", checked)
    device = SimpleNamespace(matrix_units=True, stacks_weights=True, tensor_cores_off="", lanes=32)
    cooperative.choose_variants(device, "a card", Shape(8, 8, 8))
    assert device.matrix_units == device.stacks_weights == (not off) and off in device.tensor_cores_off
    assert device.lanes == (found or 32) and device.matrix_shape == (8, 8, 8)
    monkeypatch.setenv(matrix_units.SWITCH, "trial")
    if not found:  # what the check finds is its reason
        with pytest.raises(DeviceError, match="no variant"):
            cooperative.choose_variants(device, "a card")


def test_the_table_of_radv_has_no_spilled_registers() -> None:
    """Committed: every kernel on tensor cores in waves of 64 with WMMA, and no spilled vector registers anywhere."""
    results = (ROOT / "bench/results/radv.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in results]
    assert {row["gpu"] for row in rows} == {"gfx1030", "gfx1100", "gfx1151", "gfx1201", "polaris10"}
    note = (ROOT / "bench/notes/radv.md").read_text(encoding="utf-8")
    for row in rows:
        assert row["failed"] == row["spilling"] == row["spilled_vgprs"] == 0, row
        if "matrix" in row["kernel"] and row["kernel"] != "gemm_matrix_lora_reduce":  # which has no matrices
            assert row["wave"] == [64] and row["wmma"] > 0, row
            assert f"| {row['gpu']} | {row['mesa']} | `{row['kernel']}` | {row['variants']} | 64 | " in note


def test_the_table_of_anv_spills_in_one_kernel_alone() -> None:
    """Committed: on Intel's GPUs no kernel spills but attention's backward with heads of 10 elements."""
    results = (ROOT / "bench/results/anv.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in results]
    assert {row["gpu"] for row in rows} == {"dg2", "bmg"} and not any(row["failed"] for row in rows)
    assert {row["kernel"] for row in rows} >= {"gemv", "delta_rule_grads", "moe_weight_grad", "gemm", "short_conv"}
    spilling = {row["kernel"]: (row["spilling"], row["spills"]) for row in rows if row["spilling"]}
    assert spilling == {"attention_backward_dq": (1, 17)}
