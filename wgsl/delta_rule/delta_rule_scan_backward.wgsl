// Gradients through the states of the gated delta rule, from the last chunk on: of new, to_new = scores' dy + to_end k dS';
// of what the system is solved for, to_rhs = inverse' to_new; of the state, dS = whole dS' + (inside q)' dy - (inside k)' beta to_rhs.
//
// qkv [batch, tokens, channels] QKV_T; info, mats; dy [batch, tokens, heads, VALUES] DY_T; values: plane 1 is scores' dy,
// and overwritten with to_rhs; dstates: the last slot is given, the others are overwritten.
// Dispatch: a workgroup for each COLUMNS of VALUES of each head.
#include "delta_rule.inc.wgsl" chunk
@group(0) @binding(1) var<storage, read> qkv: array<QKV_T>;
@group(0) @binding(2) var<storage, read> info: array<f32>;
@group(0) @binding(3) var<storage, read> mats: array<f32>;
@group(0) @binding(4) var<storage, read> dy: array<DY_T>;
@group(0) @binding(5) var<storage, read_write> values: array<f32>;
@group(0) @binding(6) var<storage, read_write> dstates: array<f32>;
#include "delta_rule.inc.wgsl" gates
#include "delta_rule.inc.wgsl" staged

var<private> column: u32;  // the first of the tile
var<private> deep: u32;  // the first of 64 rows of a state

fn kept_key(i: u32, d: u32) -> f32 { return key(i, d) * decay(count - 1u, i); }
fn next_gradient(d: u32, c: u32) -> f32 {
  if (d >= p.keys || column + c >= p.values) { return 0.0; }
  return dstates[cell(chunk + 1u, d, column + c)];
}
fn inverse_across(j: u32, i: u32) -> f32 { return mats[square(INVERSE, i, j)]; }
fn new_gradient(i: u32, c: u32) -> f32 {
  if (column + c >= p.values) { return 0.0; }
  return values[second(i, column + c)];
}
fn query_across(d: u32, i: u32) -> f32 { return query(i, deep + d) * inside(i); }
fn output_gradient(i: u32, c: u32) -> f32 {
  if (i >= count || column + c >= p.values) { return 0.0; }
  return f32(dy[((row + i) * p.heads + head % p.heads) * p.values + column + c]);
}
fn key_across(d: u32, i: u32) -> f32 { return -key(i, deep + d) * inside(i) * beta[i]; }

@compute @workgroup_size($INVOCATIONS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#include "delta_rule.inc.wgsl" begin
  column = group % p.tiles * COLUMNS;
  let at = column + j;
  for (var left_over = p.chunks; left_over > 0u; left_over--) {
    choose(group / p.tiles, left_over - 1u);
    load_gates(lid);
    var tile = zeros();
#include "delta_rule.inc.wgsl" add lhs=kept_key rhs=next_gradient inner=p.keys lk=e%16u lr=e/16u rk=e/ACROSS rc=e%ACROSS
#unroll n 4
#unroll c 4
    if (at + $cu < p.values) { values[second(i + $nu, at + $cu)] += tile.r$n[$c]; }
#end
#end
    storageBarrier();
    tile = zeros();
#include "delta_rule.inc.wgsl" add lhs=inverse_across rhs=new_gradient inner=CHUNK lk=e/16u lr=e%16u rk=e/ACROSS rc=e%ACROSS
#unroll n 4
#unroll c 4
    if (at + $cu < p.values) { values[second(i + $nu, at + $cu)] = tile.r$n[$c]; }
#end
#end
    storageBarrier();
    let whole = inside(count - 1u);
    for (var part = 0u; part < p.keys; part += 64u) {
      deep = part;
      tile = zeros();
#include "delta_rule.inc.wgsl" add lhs=query_across rhs=output_gradient inner=CHUNK lk=e/16u lr=e%16u rk=e/ACROSS rc=e%ACROSS
#include "delta_rule.inc.wgsl" add lhs=key_across rhs=new_gradient inner=CHUNK lk=e/16u lr=e%16u rk=e/ACROSS rc=e%ACROSS
#unroll n 4
#unroll c 4
      if (part + i + $nu < p.keys && at + $cu < p.values) {
        let after = whole * dstates[cell(chunk + 1u, part + i + $nu, at + $cu)];
        dstates[cell(chunk, part + i + $nu, at + $cu)] = after + tile.r$n[$c];
      }
#end
#end
    }
    storageBarrier();
  }
}
