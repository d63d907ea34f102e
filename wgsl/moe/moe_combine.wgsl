// Add the outputs of experts to their tokens, and the backward.
//   main:     out[t] = sum over j of weights[t, j] y[place[t, j]] (+ residual[t]); without WEIGHTED every weight is 1
//   backward: dy[s] = weights[order[s]] dsum[order[s] / chosen], dweights[order[s]] = dsum[order[s] / chosen] . y[s]
//   y [rows, columns] Y_T; out, residual [rows / chosen, columns] OUT_T, R_T: f32 or f16, or vec4 of it where columns
//   is a multiple of 4 (VEC); weights f32, place and order i32, all [rows]
// Dispatch: main: ceil(tokens * columns / 256) workgroups (folded); backward: a workgroup of 256 per row (folded).
#if BACKWARD
struct Params { rows: u32, columns: u32, chosen: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> dsum: array<OUT_T>;
@group(0) @binding(2) var<storage, read> y: array<Y_T>;
@group(0) @binding(3) var<storage, read> order: array<i32>;
@group(0) @binding(4) var<storage, read> weights: array<f32>;
@group(0) @binding(5) var<storage, read_write> dy: array<Y_T>;
@group(0) @binding(6) var<storage, read_write> dweights: array<f32>;

var<workgroup> sums: array<f32, 256>;
#include "reduce.inc.wgsl" workgroup name=row_sum type=f32 tile=sums both=mine+other

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let row = min(wg.x + wg.y * nwg.x, p.rows - 1u);
  let slot = u32(order[row]);
  let weight = weights[slot];
  var sum = C_T(0.0);
  for (var c = lid; c < p.columns; c += 256u) {
    let given = C_T(dsum[slot / p.chosen * p.columns + c]);
    sum += given * C_T(y[row * p.columns + c]);
    dy[row * p.columns + c] = Y_T(weight * given);
  }
#if VEC == 4
  let total = row_sum((sum.x + sum.y) + (sum.z + sum.w), lid);
#else
  let total = row_sum(sum, lid);
#endif
  if (lid == 0u) { dweights[slot] = total; }
}
#else
struct Params { tokens: u32, columns: u32, chosen: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> y: array<Y_T>;
@group(0) @binding(2) var<storage, read> place: array<i32>;
#if WEIGHTED
@group(0) @binding(3) var<storage, read> weights: array<f32>;
#endif
#if HAS_RESIDUAL
@group(0) @binding(4) var<storage, read> residual: array<R_T>;
#endif
@group(0) @binding(5) var<storage, read_write> out: array<OUT_T>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let at = (wg.x + wg.y * nwg.x) * 256u + lid;
  if (at >= p.tokens * p.columns) { return; }
  let first = at / p.columns * p.chosen;
  let column = at % p.columns;
  var sum = C_T(0.0);
  for (var j = 0u; j < p.chosen; j++) {
    let row = C_T(y[u32(place[first + j]) * p.columns + column]);
#if WEIGHTED
    sum += weights[first + j] * row;
#else
    sum += row;
#endif
  }
#if HAS_RESIDUAL
  sum += C_T(residual[at]);
#endif
  out[at] = OUT_T(sum);
}
#endif
