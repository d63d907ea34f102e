"""The notes of accesses to workgroup memory show the races that a shader has, and no others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.wgsl import workgroup_races
from tests.wgsl.workgroup_races import BINDING, WORKGROUPS, noted, races
from wgrad.wgsl.device import WgpuDevice
from wgrad.wgsl.runtime import compile as wgsl_compile

INVOCATIONS = 64  # two subgroups
MEMORY = "var<workgroup> a: array<u32, 64>;\n"
# Between two barriers, an access or two: what races is in RACES.
SHADER = (
    MEMORY
    + """
struct Params { n: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> y: array<u32>;
var<workgroup> several: array<array<u32, 2>, 64>;
var<workgroup> vectors: array<vec4<u32>, 64>;
var<workgroup> votes: array<u32, 1>;

fn own_array() -> u32 { var a = array<u32, 2>(1u, 2u); a[0] = 3u; return a[0]; }
fn shuffle_xor() { workgroupBarrier(); }
fn wait_of_subgroup() { workgroupBarrier(); }
fn store_by_one() { a[0] = 20u; }
fn store_by_two() { a[0] = 21u; }
fn left_part() -> u32 { return a[22]; }
fn load_part() -> u32 { return a[23]; }
fn right_element() -> u32 { return a[24]; }

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  a[lid] = p.n;
  y[lid] = a[lid ^ 1u];
  workgroupBarrier();
  y[lid] += a[lid ^ 2u] + own_array();
  y[lid] += select(0u, 1u, a[2] == 2u);
  workgroupBarrier();
  a[3] |= 3u;
  workgroupBarrier();
  a[lid] = 4u;
  a[lid] += 4u;
  votes[0] = lid;
  workgroupBarrier();
  a[5] = lid;
  workgroupBarrier();
  y[lid] += a[lid ^ 6u];
  storageBarrier();
  a[lid] = 6u;
  workgroupBarrier();
  a[lid] = 7u;
  storageBarrier();
  y[lid] += a[lid ^ 7u];
  workgroupBarrier();
  if (lid == 8u) { a[8] = 8u; }
  y[lid] += workgroupUniformLoad(&a[8]);
  y[lid] += a[8];
  workgroupBarrier();
  a[lid] = 9u;
  shuffle_xor();
  y[lid] += a[lid ^ 9u];
  workgroupBarrier();
  if (lid == 0u) { vectors[0].x = 10u; }
  if (lid == 1u) { vectors[0].y = 10u; }
  workgroupBarrier();
  vectors[lid] = vec4(11u);
  y[lid] += vectors[lid ^ 11u].w;
  workgroupBarrier();
  a[lid] = 12u;
  y[lid] += vectors[1][a[lid ^ 12u] & 3u];
  workgroupBarrier();
  a[lid] = 13u;
  y[lid] += several[lid][a[lid ^ 13u] & 1u];
  workgroupBarrier();
  several[lid][1] = 14u;
  let both = several[lid ^ 14u];
  workgroupBarrier();
  if (lid < 32u) { store_by_one(); }
  workgroupBarrier();
  store_by_two();
  workgroupBarrier();
  if (lid == 0u) { a[22] = 22u; y[0] += left_part(); }
  if (lid == 0u) { a[23] = 23u; y[0] += load_part(); }
  if (lid == 0u) { a[24] = 24u; y[0] += right_element(); }
  workgroupBarrier();
  a[select(lid, 15u, wg.x == 0u)] = 15u;
  workgroupBarrier();
  a[select(lid, 16u, wg.x == 1u)] = 16u;
  workgroupBarrier();
  a[select(lid, 17u, wg.y == 1u)] = 17u;
  y[lid] += both[0];
  workgroupBarrier();
  a[lid] = 18u;
  workgroupBarrier();
  a[lid] = 19u;
  wait_of_subgroup();
  y[lid] += a[lid ^ 19u];
  workgroupBarrier();
  a[lid] = 25u;
  wait_of_subgroup();
  y[lid] += a[lid ^ 32u];
}
"""
)
RACES = [
    "a[lid] = p.n; | y[lid] = a[lid ^ 1u];",
    "a[3] |= 3u; | a[3] |= 3u;",
    "a[5] = lid; | a[5] = lid;",
    "a[lid] = 7u; | y[lid] += a[lid ^ 7u];",  # other invocations see storage alone behind a storageBarrier
    "a[lid] = 9u; | y[lid] += a[lid ^ 9u];",  # the emulation's barrier is none of the shader
    "a[lid] = 25u; | y[lid] += a[lid ^ 32u];",  # of another subgroup
    "vectors[lid] = vec4(11u); | y[lid] += vectors[lid ^ 11u].w;",
    "a[lid] = 12u; | y[lid] += vectors[1][a[lid ^ 12u] & 3u];",
    "a[lid] = 13u; | y[lid] += several[lid][a[lid ^ 13u] & 1u];",
    "several[lid][1] = 14u; | let both = several[lid ^ 14u];",
    "fn store_by_two() { a[0] = 21u; } | fn store_by_two() { a[0] = 21u; }",
    # a subgroup is not the invocation that wrote
    "if (lid == 0u) { a[22] = 22u; y[0] += left_part(); } | fn left_part() -> u32 { return a[22]; }",
    "if (lid == 0u) { a[23] = 23u; y[0] += load_part(); } | fn load_part() -> u32 { return a[23]; }",
    "if (lid == 0u) { a[24] = 24u; y[0] += right_element(); } | fn right_element() -> u32 { return a[24]; }",
    # of the first two of four workgroups
    "a[select(lid, 15u, wg.x == 0u)] = 15u; | a[select(lid, 15u, wg.x == 0u)] = 15u;",
    "a[select(lid, 16u, wg.x == 1u)] = 16u; | a[select(lid, 16u, wg.x == 1u)] = 16u;",
]


def pairs(lines: list[str]) -> set[frozenset[str]]:
    """Return races without the order of their two lines."""
    return {frozenset(line.split(" | ")) for line in lines}


def test_the_notes_show_each_race_and_no_other(
    wgpu_device: WgpuDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "accesses.wgsl").write_text(SHADER, encoding="utf-8")
    found = noted(SHADER)
    monkeypatch.setattr(wgsl_compile, "assemble", lambda source, constants: noted(source).text)
    notes = wgpu_device.upload(np.zeros(WORKGROUPS * INVOCATIONS * 105 + 1, np.int32))
    arrays = [wgpu_device.zeros((INVOCATIONS,), np.uint32), *[None] * (BINDING - 2), notes]
    wgpu_device.launch(str(tmp_path / "accesses"), arrays, [1], (2, 2, 1))
    assert pairs(races(wgpu_device.download(notes), found)) == pairs(RACES)


def test_nothing_noted_is_no_race() -> None:
    none = np.array([0] * WORKGROUPS * INVOCATIONS + [INVOCATIONS], np.int32)
    assert races(none, noted(SHADER)) == []
    assert noted("fn f() {}").text == "fn f() {}" and races(none, noted("fn f() {}")) == []


def test_a_launch_with_more_accesses_than_notes_is_refused() -> None:
    full = np.array([1] * WORKGROUPS * INVOCATIONS + [INVOCATIONS], np.int32)
    with pytest.raises(ValueError, match="more than 1 accesses and barriers"):
        races(full, noted(SHADER))


def test_what_is_not_understood_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="a whole array of workgroup memory: let all = a;"):
        noted(f"{MEMORY}fn f() {{\n  let all = a;\n}}")
    monkeypatch.setattr(workgroup_races, "_SITE_BITS", 1)
    with pytest.raises(ValueError, match="2 accesses, more than have a number"):
        noted(f"{MEMORY}fn f() {{\n  a[0] = 1u;\n  a[1] = 1u;\n}}")
