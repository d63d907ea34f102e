"""gemm_matrix.wgsl on a device without matrix units: cooperative operations rewritten as plain WGSL.

An accumulator becomes eight floats of each of the 32 invocations of a subgroup, an operand the place in workgroup
memory where it was loaded from; all else of the shader, staging, edges, decoding and epilogue, runs as it is.
"""

from __future__ import annotations

import re

_HELPERS = """
fn element_a(at: u32, ld: u32, by_rows: bool, row: u32, col: u32) -> f32 {
  let i = select(col, row, by_rows) * ld * 4u + select(row, col, by_rows);
  return f32(a_tile[at + i / 4u][i % 4u]);
}
fn element_b(at: u32, ld: u32, by_rows: bool, row: u32, col: u32) -> f32 {
  let i = select(col, row, by_rows) * ld * 4u + select(row, col, by_rows);
  return f32(b_tile[at + i / 4u][i % 4u]);
}
struct Operand { at: u32, ld: u32, by_rows: bool }
fn multiply_add(lane: u32, x: Operand, y: Operand, sum: array<f32, 8>) -> array<f32, 8> {
  var r = sum;
  for (var e = 0u; e < 8u; e++) {
    let i = lane * 8u + e;
    for (var k = 0u; k < 16u; k++) {
      r[e] += element_a(x.at, x.ld, x.by_rows, i / 16u, k) * element_b(y.at, y.ld, y.by_rows, k, i % 16u);
    }
  }
  return r;
}
fn store_strip(lane: u32, sum: array<f32, 8>, at: u32, ld: u32) {
  var s = sum;
  for (var e = 0u; e < 8u; e++) {
    let i = lane * 8u + e;
    let to = (i / 16u) * ld * 4u + i % 16u;
    strips[at + to / 4u][to % 4u] = s[e];
  }
}
"""


def emulated(text: str) -> str:
    """The assembled text of a variant without cooperative operations. ValueError where one is left."""
    text = text.replace("enable wgpu_cooperative_matrix;\n", "")
    text = re.sub(r"coop_mat16x16<f32, C>\(\)", "array<f32, 8>()", text)
    text = re.sub(r"coopLoadT<coop_mat16x16<f16, [AB]>>\(&\w+\[(\w+)\], (\w+)\)", r"Operand(\1, \2, true)", text)
    text = re.sub(r"coopLoad<coop_mat16x16<f16, [AB]>>\(&\w+\[(\w+)\], (\w+)\)", r"Operand(\1, \2, false)", text)
    text = re.sub(r"coopMultiplyAdd\((\w+), (\w+), (\w+)\)", r"multiply_add(lid % 32u, \1, \2, \3)", text)
    text = re.sub(r"coopStoreT\((\w+), &strips\[(\w+)\], (\w+)\)", r"store_strip(lid % 32u, \1, \2, \3)", text)
    if "coop" in re.sub(r"//.*", "", text):
        raise ValueError("a cooperative operation that the emulation does not know")
    return text + _HELPERS
