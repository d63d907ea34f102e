// delta_rule_output.wgsl on tensor cores: y = inside q S + scores new of each chunk, scores = q k' decay; with BACKWARD
// scores' dy. Arrays as there, but qkv and y (or dy) are f16. Dispatch: a workgroup per chunk of each head.
enable f16;
enable wgpu_cooperative_matrix;
#include "delta_rule.inc.wgsl" chunk
@group(0) @binding(1) var<storage, read> qkv: array<vec4<f16>>;
@group(0) @binding(2) var<storage, read> info: array<f32>;
@group(0) @binding(3) var<storage, read_write> mats: array<vec4<f32>>;
#if BACKWARD
@group(0) @binding(4) var<storage, read_write> values: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> y: array<vec4<f16>>;
#else
@group(0) @binding(4) var<storage, read> values: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> states: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> y: array<vec4<f16>>;
#endif
#include "delta_rule.inc.wgsl" gates
#include "delta_rule_matrix.inc.wgsl" products
#include "delta_rule_matrix.inc.wgsl" fours

var<private> column: u32;  // the first four of the tile

fn output_at(i: u32, c: u32) -> u32 { return ((row + i) * p.heads + head % p.heads) * values4() + column + c; }
#if BACKWARD
fn score_across(i: u32, j: u32) -> vec4<f32> { return mats[square(SCORES, i, 0u) / 4u + j]; }
// Not 0 beyond the last token: scores are.
fn output_gradient(i: u32, c: u32) -> vec4<f32> { return vec4<f32>(y[output_at(min(i, count - 1u), c)]); }
#else
fn score(i: u32, j: u32) -> vec4<f32> { return mats[square(SCORES, i, 0u) / 4u + j]; }
fn query_inside(i: u32, d: u32) -> vec4<f32> { return query(i, d) * inside[i]; }
fn state(d: u32, c: u32) -> vec4<f32> { return states[cell(chunk, d, 0u) / 4u + column + c]; }
fn new_value(i: u32, c: u32) -> vec4<f32> { return values[token(i, 0u) / 4u + column + c]; }
#endif

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#include "delta_rule_matrix.inc.wgsl" place
  place_channels();
  load_gates(lid);
  var tile: Tile;
#include "delta_rule_matrix.inc.wgsl" sums
#include "delta_rule_matrix.inc.wgsl" along_both lhs=query rhs=key inner=p.keys
#include "delta_rule_matrix.inc.wgsl" summed
#unroll n 4
  mats[square(SCORES, i + $nu, j) / 4u] = tile.r$n * decays(i + $nu, j);
#end
  storageBarrier();
  for (var part = 0u; part < values4(); part += 16u) {
    column = part;
#include "delta_rule_matrix.inc.wgsl" sums
#if BACKWARD
#include "delta_rule_matrix.inc.wgsl" along_none lhs=score_across rhs=output_gradient inner=CHUNK
#else
#include "delta_rule_matrix.inc.wgsl" along_left lhs=query_inside rhs=state inner=p.keys
#include "delta_rule_matrix.inc.wgsl" along_left lhs=score rhs=new_value inner=CHUNK
#endif
#include "delta_rule_matrix.inc.wgsl" summed
#unroll n 4
#if BACKWARD
    values[second(i + $nu, 0u) / 4u + part + tx] = tile.r$n;
#else
    if (i + $nu < count) { y[output_at(i + $nu, tx)] = vec4<f16>(tile.r$n); }
#endif
#end
  }
}
