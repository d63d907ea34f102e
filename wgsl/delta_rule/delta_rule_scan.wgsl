// The states of the gated delta rule, chunk after chunk: new = inverse beta (v - inside k S), S' = whole S + (to_end k)' new.
//
// qkv [batch, tokens, channels] QKV_T; info, mats: of delta_rule_system.wgsl; values (plane 0): new; states: slot 0 is
// given, the others are overwritten.
// Dispatch: a workgroup for each COLUMNS of VALUES of each head.
#include "delta_rule.inc.wgsl" chunk
@group(0) @binding(1) var<storage, read> qkv: array<QKV_T>;
@group(0) @binding(2) var<storage, read> info: array<f32>;
@group(0) @binding(3) var<storage, read> mats: array<f32>;
@group(0) @binding(4) var<storage, read_write> values: array<f32>;
@group(0) @binding(5) var<storage, read_write> states: array<f32>;
#include "delta_rule.inc.wgsl" gates
#include "delta_rule.inc.wgsl" staged
#include "delta_rule.inc.wgsl" folded

var<private> column: u32;  // the first of the tile
var<private> deep: u32;  // the first of 64 rows of a state

fn state(d: u32, c: u32) -> f32 { return states[cell(chunk, min(d, p.keys - 1u), min(column + c, p.values - 1u))]; }
fn inverse(i: u32, j: u32) -> f32 { return mats[square(INVERSE, i, j)]; }
fn new_value(i: u32, c: u32) -> f32 { return values[token(i, min(column + c, p.values - 1u))]; }
fn kept_key(d: u32, i: u32) -> f32 { return key(i, deep + d) * to_end[i]; }

@compute @workgroup_size($INVOCATIONS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#include "delta_rule.inc.wgsl" begin
  column = group % p.tiles * COLUMNS;
  let at = column + j;
  for (var number = 0u; number < p.chunks; number++) {
    choose(group / p.tiles, number);
    load_gates(lid);
    var tile = zeros();
#include "delta_rule.inc.wgsl" add lhs=key rhs=state inner=p.keys lk=e%DEEP lr=e/DEEP rk=e/ACROSS rc=e%ACROSS
#include "delta_rule.inc.wgsl" fold
    for (var n = share; n < 4u; n += SPLIT) {
      let read = select(vec4<f32>(0.0), folded(n, lid) * inside[i + n], start[i + n] < 0.0);
#unroll c 4
      if (at + $cu < p.values) { values[token(i + n, at + $cu)] = beta[i + n] * (value(i + n, at + $cu) - read[$c]); }
#end
    }
    storageBarrier();
    tile = zeros();
#include "delta_rule.inc.wgsl" add lhs=inverse rhs=new_value inner=CHUNK lk=e%DEEP lr=e/DEEP rk=e/ACROSS rc=e%ACROSS
#include "delta_rule.inc.wgsl" fold
    for (var n = share; n < 4u; n += SPLIT) {
      let correction = folded(n, lid);
#unroll c 4
      if (at + $cu < p.values) { values[token(i + n, at + $cu)] = correction[$c]; }
#end
    }
    storageBarrier();
    let whole = inside[count - 1u];
    let stays = start[count - 1u] < 0.0;
    for (var part = 0u; part < p.keys; part += 64u) {
      deep = part;
      tile = zeros();
#include "delta_rule.inc.wgsl" add lhs=kept_key rhs=new_value inner=CHUNK lk=e/16u lr=e%16u rk=e/ACROSS rc=e%ACROSS
#include "delta_rule.inc.wgsl" fold
      for (var n = share; n < 4u; n += SPLIT) {
        let added = folded(n, lid);
#unroll c 4
        if (part + i + n < p.keys && at + $cu < p.values) {
          let before = select(0.0, whole * states[cell(chunk, part + i + n, at + $cu)], stays);
          states[cell(chunk + 1u, part + i + n, at + $cu)] = before + added[$c];
        }
#end
      }
    }
    storageBarrier();
  }
}
