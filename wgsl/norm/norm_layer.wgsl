// LayerNorm over rows: y = (x - mean) rstd weight + bias, rstd = 1 / sqrt(mean((x - mean)^2) + eps).
// backward, with xn = (x - mean) rstd and g = dy weight: dx = rstd (g - mean(g) - xn mean(g xn)).
// dweight: part[chunk, c] = sum of dy xn over the chunk's rows; reduce_rows.wgsl adds the chunks (and dy's rows:
// dbias).
//   x, y, dy, dx [rows, columns] f32 or f16 (X_T, Y_T, DY_T, DX_T: vec4 where columns is a multiple of 4; columns
//   counts such elements); weight, bias [columns] C_T; mean, rstd [rows] f32; part [chunks, columns] C_T.
// forward, backward: LANES invocations share a row, as in norm_rms.wgsl, with PER elements in registers; the rest is
// read again. Dispatch: ceil(rows * LANES / 256) workgroups (folded).
// dweight: (ceil(columns / WIDE), chunks) workgroups; see reduce.inc.wgsl (columns).
// Source: Ba, Kiros and Hinton, Layer Normalization (2016).
#if FORWARD
struct Params { rows: u32, columns: u32, inverse_count: f32, eps: f32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<X_T>;
@group(0) @binding(2) var<storage, read> weight: array<C_T>;
@group(0) @binding(3) var<storage, read> bias: array<C_T>;
@group(0) @binding(4) var<storage, read_write> y: array<Y_T>;
@group(0) @binding(5) var<storage, read_write> mean: array<f32>;
@group(0) @binding(6) var<storage, read_write> rstd: array<f32>;
#else
struct Params { rows: u32, columns: u32, inverse_count: f32, rows_per_chunk: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> dy: array<DY_T>;
@group(0) @binding(2) var<storage, read> x: array<X_T>;
@group(0) @binding(3) var<storage, read> mean: array<f32>;
@group(0) @binding(4) var<storage, read> rstd: array<f32>;
@group(0) @binding(5) var<storage, read_write> dx: array<DX_T>;
@group(0) @binding(6) var<storage, read> weight: array<C_T>;
@group(0) @binding(7) var<storage, read_write> part: array<C_T>;
#endif

#include "norm.inc.wgsl" row_sum
fn across(a: C_T) -> f32 { return product(a, C_T(1.0)); }

#if FORWARD
@compute @workgroup_size(256)
fn forward(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let place = ((wg.x + wg.y * nwg.x) * 256u + lid) / LANES;
  let row = min(place, p.rows - 1u);  // every invocation must call row_sum
  let base = row * p.columns;
  let lane = lid % LANES;
  var total = 0.0;
#unroll i PER
  let c$i = lane + $i * LANES;
  let x$i = C_T(x[base + min(c$i, p.columns - 1u)]);
  if (c$i < p.columns) { total += across(x$i); }
#end
  for (var c = lane + PER * LANES; c < p.columns; c += LANES) { total += across(C_T(x[base + c])); }
  // Rounding the mean to f32 matters if it is large relative to the deviation. The mean of x - near corrects it.
  let near = row_sum(total, lid) * p.inverse_count;
  var missed = 0.0;
  var squares = 0.0;
#unroll i PER
  if (c$i < p.columns) {
    missed += across(x$i - near);
    squares += product(x$i - near, x$i - near);
  }
#end
  for (var c = lane + PER * LANES; c < p.columns; c += LANES) {
    let d = C_T(x[base + c]) - near;
    missed += across(d);
    squares += product(d, d);
  }
  let rest = row_sum(missed, lid) * p.inverse_count;
  let variance = max(row_sum(squares, lid) * p.inverse_count - rest * rest, 0.0);
  let r = inverseSqrt(variance + p.eps);
  if (place >= p.rows) { return; }
  if (lane == 0u) {
    mean[row] = near + rest;
    rstd[row] = r;
  }
#unroll i PER
  if (c$i < p.columns) { y[base + c$i] = Y_T((x$i - near - rest) * r * weight[c$i] + bias[c$i]); }
#end
  for (var c = lane + PER * LANES; c < p.columns; c += LANES) {
    y[base + c] = Y_T((C_T(x[base + c]) - near - rest) * r * weight[c] + bias[c]);
  }
}
#else
@compute @workgroup_size(256)
fn backward(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let place = ((wg.x + wg.y * nwg.x) * 256u + lid) / LANES;
  let row = min(place, p.rows - 1u);
  let base = row * p.columns;
  let r = rstd[row];
  var total = 0.0;
  var along = 0.0;
#unroll i PER
  let c$i = lid % LANES + $i * LANES;
  let at$i = min(c$i, p.columns - 1u);
  let g$i = C_T(dy[base + at$i]) * weight[at$i];
  let n$i = normed(row, at$i);
  if (c$i < p.columns) {
    total += across(g$i);
    along += product(g$i, n$i);
  }
#end
  for (var c = lid % LANES + PER * LANES; c < p.columns; c += LANES) {
    let g = C_T(dy[base + c]) * weight[c];
    total += across(g);
    along += product(g, normed(row, c));
  }
  let g_mean = row_sum(total, lid) * p.inverse_count;
  let k = row_sum(along, lid) * p.inverse_count;
  if (place >= p.rows) { return; }
#unroll i PER
  if (c$i < p.columns) { dx[base + c$i] = DX_T(r * (g$i - g_mean - n$i * k)); }
#end
  for (var c = lid % LANES + PER * LANES; c < p.columns; c += LANES) {
    dx[base + c] = DX_T(r * (C_T(dy[base + c]) * weight[c] - g_mean - normed(row, c) * k));
  }
}

fn normed(row: u32, c: u32) -> C_T { return (C_T(x[row * p.columns + c]) - mean[row]) * rstd[row]; }
fn term(row: u32, c: u32) -> C_T { return C_T(dy[row * p.columns + c]) * normed(row, c); }
#include "reduce.inc.wgsl" columns of=term

@compute @workgroup_size(256)
fn dweight(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let column = wg.x * WIDE + lid % WIDE;
  let first = wg.y * p.rows_per_chunk;
  let sum = column_sum(first, min(first + p.rows_per_chunk, p.rows), min(column, p.columns - 1u), lid);
  if (lid < WIDE && column < p.columns) { part[wg.y * p.columns + column] = sum; }
}
#endif
