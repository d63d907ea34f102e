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
#include "delta_rule.inc.wgsl" loads
#include "delta_rule.inc.wgsl" staged
#include "delta_rule.inc.wgsl" folded

var<private> column: u32;  // the first of the tile
var<private> deep: u32;  // the first of 64 rows of a state

fn kept_key(i: u32, d: u32) -> f32 { return key(i, d) * to_end[i]; }
fn next_gradient(d: u32, c: u32) -> f32 {
  return dstates[cell(chunk + 1u, min(d, p.keys - 1u), min(column + c, p.values - 1u))];
}
fn inverse_across(j: u32, i: u32) -> f32 { return mats[square(INVERSE, i, j)]; }
fn new_gradient(i: u32, c: u32) -> f32 { return values[second(i, min(column + c, p.values - 1u))]; }
fn query_across(d: u32, i: u32) -> f32 { return query(i, deep + d) * inside[i]; }
fn output_gradient(i: u32, c: u32) -> f32 {
  let at = ((row + min(i, count - 1u)) * p.heads + head % p.heads) * p.values + min(column + c, p.values - 1u);
  return select(0.0, f32(dy[at]), i < count);
}
fn key_across(d: u32, i: u32) -> f32 { return -key(i, deep + d) * inside[i] * beta[i]; }

@compute @workgroup_size($INVOCATIONS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#include "delta_rule.inc.wgsl" begin
  column = group % p.tiles * COLUMNS;
  let at = column + j;
  for (var after = p.chunks; after > 0u; after--) {
    choose(group / p.tiles, after - 1u);
    load_gates(lid);
    var tile = zeros();
#include "delta_rule.inc.wgsl" add lhs=kept_key rhs=next_gradient inner=p.keys lk=e%DEEP lr=e/DEEP rk=e/ACROSS rc=e%ACROSS
#include "delta_rule.inc.wgsl" fold
    for (var n = share; n < 4u; n += SPLIT) {
      let through = folded(n, lid);
#unroll c 4
      if (at + $cu < p.values) { values[second(i + n, at + $cu)] += through[$c]; }
#end
    }
    storageBarrier();
    tile = zeros();
#include "delta_rule.inc.wgsl" add lhs=inverse_across rhs=new_gradient inner=CHUNK lk=e/16u lr=e%16u rk=e/ACROSS rc=e%ACROSS
#include "delta_rule.inc.wgsl" fold
    for (var n = share; n < 4u; n += SPLIT) {
      let solved = folded(n, lid);
#unroll c 4
      if (at + $cu < p.values) { values[second(i + n, at + $cu)] = solved[$c]; }
#end
    }
    storageBarrier();
    let whole = inside[count - 1u];
    for (var part = 0u; part < p.keys; part += 64u) {
      deep = part;
      tile = zeros();
#include "delta_rule.inc.wgsl" add lhs=query_across rhs=output_gradient inner=CHUNK lk=e/16u lr=e%16u rk=e/ACROSS rc=e%ACROSS
#include "delta_rule.inc.wgsl" add lhs=key_across rhs=new_gradient inner=CHUNK lk=e/16u lr=e%16u rk=e/ACROSS rc=e%ACROSS
#include "delta_rule.inc.wgsl" fold
      for (var n = share; n < 4u; n += SPLIT) {
        let added = folded(n, lid);
#unroll c 4
        if (part + i + n < p.keys && at + $cu < p.values) {
          let later = whole * dstates[cell(chunk + 1u, part + i + n, at + $cu)];
          dstates[cell(chunk, part + i + n, at + $cu)] = later + added[$c];
        }
#end
      }
    }
    storageBarrier();
  }
}
