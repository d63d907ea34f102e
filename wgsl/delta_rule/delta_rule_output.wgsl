// The output of the gated delta rule for each chunk: y = inside q S + scores new, scores = q k' decay; without
// CORRECTED plus skip v. With BACKWARD, it computes the first part of the gradient of new instead: scores' dy.
//
// qkv [batch, tokens, channels] QKV_T; info; mats: scores are overwritten; values: plane 0 is new, and plane 1 with
// BACKWARD overwritten; states; y [batch, tokens, heads, VALUES] Y_T: overwritten, or with BACKWARD dy.
// Dispatch: a workgroup per chunk of each head.
#include "delta_rule.inc.wgsl" chunk
@group(0) @binding(1) var<storage, read> qkv: array<QKV_T>;
@group(0) @binding(2) var<storage, read> info: array<f32>;
@group(0) @binding(3) var<storage, read_write> mats: array<f32>;
#if BACKWARD
@group(0) @binding(4) var<storage, read_write> values: array<f32>;
@group(0) @binding(6) var<storage, read> y: array<Y_T>;
#else
@group(0) @binding(4) var<storage, read> values: array<f32>;
@group(0) @binding(5) var<storage, read> states: array<f32>;
@group(0) @binding(6) var<storage, read_write> y: array<Y_T>;
#if !CORRECTED
@group(0) @binding(7) var<storage, read> skip: array<f32>;
#endif
#endif
#include "delta_rule.inc.wgsl" gates
#include "delta_rule.inc.wgsl" loads
#include "delta_rule.inc.wgsl" staged

var<private> column: u32;  // the first of the tile

fn key_across(d: u32, j: u32) -> f32 { return key(j, d); }
fn output_at(i: u32, c: u32) -> u32 { return ((row + i) * p.heads + head % p.heads) * p.values + column + c; }
#if BACKWARD
fn score_across(j: u32, i: u32) -> f32 { return mats[square(SCORES, i, j)]; }
fn output_gradient(i: u32, c: u32) -> f32 {
  return select(0.0, f32(y[output_at(min(i, count - 1u), min(c, p.values - column - 1u))]), i < count);
}
#else
fn score(i: u32, j: u32) -> f32 { return mats[square(SCORES, i, j)]; }
fn state(d: u32, c: u32) -> f32 { return states[cell(chunk, min(d, p.keys - 1u), min(column + c, p.values - 1u))]; }
fn new_value(i: u32, c: u32) -> f32 { return values[token(i, min(column + c, p.values - 1u))]; }
#endif

@compute @workgroup_size($INVOCATIONS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#include "delta_rule.inc.wgsl" begin
  choose(group / p.chunks, group % p.chunks);
  load_gates(lid);
  var tile = zeros();
#include "delta_rule.inc.wgsl" add lhs=query rhs=key_across inner=p.keys lk=e%DEEP lr=e/DEEP rk=e%DEEP rc=e/DEEP
#unroll n 4
#unroll c 4
  mats[square(SCORES, i + $nu, j + $cu)] = tile.r$n[$c] * decay(i + $nu, j + $cu);
#end
#end
  storageBarrier();
  for (var part = 0u; part < p.values; part += COLUMNS) {
    column = part;
    tile = zeros();
#if BACKWARD
#include "delta_rule.inc.wgsl" add lhs=score_across rhs=output_gradient inner=CHUNK lk=e/16u lr=e%16u rk=e/ACROSS rc=e%ACROSS
#unroll n 4
#unroll c 4
    if (part + j + $cu < p.values) { values[second(i + $nu, part + j + $cu)] = tile.r$n[$c]; }
#end
#end
#else
#include "delta_rule.inc.wgsl" add lhs=query rhs=state inner=p.keys lk=e%DEEP lr=e/DEEP rk=e/ACROSS rc=e%ACROSS
#unroll n 4
    tile.r$n = select(vec4<f32>(0.0), tile.r$n * inside[i + $nu], start[i + $nu] < 0.0);
#end
#include "delta_rule.inc.wgsl" add lhs=score rhs=new_value inner=CHUNK lk=e%DEEP lr=e/DEEP rk=e/ACROSS rc=e%ACROSS
#if !CORRECTED
    // `value` clamps columns beyond the last, which are not stored.
    let kept = skip[head % p.heads];
#unroll n 4
#unroll c 4
    tile.r$n[$c] += kept * value(i + $nu, part + j + $cu);
#end
#end
#endif
#unroll n 4
#unroll c 4
    if (i + $nu < count && part + j + $cu < p.values) { y[output_at(i + $nu, j + $cu)] = Y_T(tile.r$n[$c]); }
#end
#end
#endif
  }
}
