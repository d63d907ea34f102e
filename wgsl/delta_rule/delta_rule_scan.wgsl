// The states of the gated delta rule, chunk after chunk: new = inverse beta (v - inside k S), S' = whole S + (to_end
// k)' new. Without CORRECTED, new = beta v.
//
// info, mats: of delta_rule_system.wgsl; values (plane 0): inverse beta v, overwritten with new; states: slot 0 is
// given, the others are overwritten.
// Dispatch: a workgroup per COLUMNS of VALUES of each head.
#include "delta_rule.inc.wgsl" chunk
@group(0) @binding(1) var<storage, read> info: array<f32>;
@group(0) @binding(2) var<storage, read> mats: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> values: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> states: array<vec4<f32>>;
#include "delta_rule.inc.wgsl" gates
#include "delta_rule.inc.wgsl" staged
#include "delta_rule.inc.wgsl" folded

var<private> column: u32;  // the first four of the tile
var<private> deep: u32;  // the first four of 64 rows of a state

fn place(c: u32) -> u32 { return min(column + c, values4() - 1u); }
fn decayed_key(r: u32, d: u32) -> vec4<f32> {
  return select(vec4<f32>(0.0), mats[by_key(DECAYED, min(d, p.keys - 1u), 0u) / 4u + r], d < p.keys);
}
fn state(d: u32, c: u32) -> vec4<f32> { return states[cell(chunk, min(d, p.keys - 1u), 0u) / 4u + place(c)]; }
fn kept_key(r: u32, i: u32) -> vec4<f32> { return mats[by_token(KEPT, i, 0u) / 4u + min(deep + r, keys4() - 1u)]; }
fn new_value(i: u32, c: u32) -> vec4<f32> { return values[token(i, 0u) / 4u + place(c)]; }

@compute @workgroup_size($INVOCATIONS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#include "delta_rule.inc.wgsl" begin
  column = group % p.tiles * ACROSS;
  let there = column + tx < values4();
  for (var number = 0u; number < p.chunks; number++) {
    choose(group / p.tiles, number);
    load_gates(lid);
    var tile = zeros();
#if CORRECTED
#include "delta_rule.inc.wgsl" add4 lhs=decayed_key rhs=state inner=p.keys
#include "delta_rule.inc.wgsl" fold
    for (var n = share; n < 4u && there; n += SPLIT) {
      values[token(i + n, 0u) / 4u + column + tx] -= select(vec4<f32>(0.0), folded(n, lid), start[i + n] < 0.0);
    }
    storageBarrier();
#endif
    let whole = inside[count - 1u];
    let stays = start[count - 1u] < 0.0;
    for (var part = 0u; part < p.keys; part += 64u) {
      deep = part / 4u;
      tile = zeros();
#include "delta_rule.inc.wgsl" add4 lhs=kept_key rhs=new_value inner=CHUNK
#include "delta_rule.inc.wgsl" fold
      for (var n = share; n < 4u && there; n += SPLIT) {
        if (part + i + n < p.keys) {
          let at = cell(chunk, part + i + n, 0u) / 4u + column + tx;
          let before = select(vec4<f32>(0.0), whole * states[at], stays);
          states[cell(chunk + 1u, part + i + n, 0u) / 4u + column + tx] = before + folded(n, lid);
        }
      }
    }
    storageBarrier();
  }
}
