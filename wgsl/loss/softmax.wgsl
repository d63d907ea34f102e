// Softmax over the last axis, and its backward.
//   main:     y = exp(x - max x) / sum exp(x - max x)
//   backward: dx = y (dy - sum(dy y))
//   x (dy), y, out [rows, columns] X_T, Y_T: f32 or f16. `out` is y forward and dx backward.
// Dispatch: one workgroup of 256 per row (folded). Rows are read once per pass; short ones stay in the cache.
struct Params { rows: u32, columns: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<X_T>;
@group(0) @binding(2) var<storage, read> y: array<Y_T>;
@group(0) @binding(3) var<storage, read_write> out: array<X_T>;

var<workgroup> shared_value: array<f32, 256>;

#include "reduce.inc.wgsl" workgroup name=row_max type=f32 tile=shared_value both=max(mine,other)
#include "reduce.inc.wgsl" workgroup name=row_sum type=f32 tile=shared_value both=mine+other

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let row = wg.x + wg.y * nwg.x;
  let base = min(row, p.rows - 1u) * p.columns;
  var top = f32(x[base]);
  for (var c = lid; c < p.columns; c += 256u) { top = max(top, f32(x[base + c])); }
  top = row_max(top, lid);
  workgroupBarrier();
  var sum = 0.0;
  for (var c = lid; c < p.columns; c += 256u) { sum += exp(f32(x[base + c]) - top); }
  sum = row_sum(sum, lid);
  if (row >= p.rows) { return; }
  for (var c = lid; c < p.columns; c += 256u) { out[base + c] = X_T(exp(f32(x[base + c]) - top) / sum); }
}

@compute @workgroup_size(256)
fn backward(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let row = wg.x + wg.y * nwg.x;
  let base = min(row, p.rows - 1u) * p.columns;
  var sum = 0.0;
  for (var c = lid; c < p.columns; c += 256u) { sum += f32(x[base + c]) * f32(y[base + c]); }
  sum = row_sum(sum, lid);
  if (row >= p.rows) { return; }
  for (var c = lid; c < p.columns; c += 256u) { out[base + c] = X_T(f32(y[base + c]) * (f32(x[base + c]) - sum)); }
}
