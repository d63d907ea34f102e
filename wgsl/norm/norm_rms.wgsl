// RMSNorm: y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps), over rows.
//   x, y [rows, columns] f32 or f16 (X_T, Y_T: vec4 where columns is a multiple of 4); weight [columns] f32 (C_T);
//   rstd [rows] f32, which the backward reads again. columns counts elements of X_T.
// LANES invocations share a row, 256 / LANES rows per workgroup. Each keeps PER elements of the row in registers, so
// that x is read once. The part of a row beyond LANES * PER is read twice (from the cache).
// Dispatch: ceil(rows * LANES / 256) workgroups (folded).
// Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
struct Params { rows: u32, columns: u32, inverse_count: f32, eps: f32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<X_T>;
@group(0) @binding(2) var<storage, read> weight: array<C_T>;
@group(0) @binding(3) var<storage, read_write> y: array<Y_T>;
@group(0) @binding(4) var<storage, read_write> rstd: array<f32>;

#include "norm.inc.wgsl" row_sum

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let row = ((wg.x + wg.y * nwg.x) * 256u + lid) / LANES;
  let lane = lid % LANES;
  let base = min(row, p.rows - 1u) * p.columns;
#unroll i PER
  let c$i = lane + $i * LANES;
  let x$i = C_T(x[base + min(c$i, p.columns - 1u)]);
#end
  var squares = 0.0;
#unroll i PER
  if (c$i < p.columns) { squares += product(x$i, x$i); }
#end
  for (var c = lane + PER * LANES; c < p.columns; c += LANES) {
    let xc = C_T(x[base + c]);
    squares += product(xc, xc);
  }
  let r = inverseSqrt(row_sum(squares, lid) * p.inverse_count + p.eps);
  if (row >= p.rows) { return; }
  if (lane == 0u) { rstd[row] = r; }
#unroll i PER
  if (c$i < p.columns) { y[base + c$i] = Y_T(x$i * r * weight[c$i]); }
#end
  for (var c = lane + PER * LANES; c < p.columns; c += LANES) { y[base + c] = Y_T(C_T(x[base + c]) * r * weight[c]); }
}
