// Gradients through the states of the gated delta rule, from the last chunk to the first: of new, to_new = scores' dy +
// to_end k dS'; of the state, dS = whole dS' + (inside q)' dy - (inverse beta inside k)' to_new, without CORRECTED
// without the last term.
//
// info, mats: of delta_rule_system.wgsl; dy [batch, tokens, heads, VALUES] DY_T; values: plane 1 is scores' dy, and
// overwritten with to_new; dstates: the last slot is given, the others are overwritten.
// Dispatch: a workgroup per COLUMNS of VALUES of each head.
#include "delta_rule.inc.wgsl" chunk
@group(0) @binding(1) var<storage, read> info: array<f32>;
@group(0) @binding(2) var<storage, read> mats: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> dy: array<DY_T>;
@group(0) @binding(4) var<storage, read_write> values: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> dstates: array<vec4<f32>>;
#include "delta_rule.inc.wgsl" gates
#include "delta_rule.inc.wgsl" staged
#include "delta_rule.inc.wgsl" folded

var<private> column: u32;  // the first four of the tile
var<private> deep: u32;  // the first four of 64 rows of a state

fn place(c: u32) -> u32 { return min(column + c, values4() - 1u); }
fn kept_across(r: u32, d: u32) -> vec4<f32> {
  return select(vec4<f32>(0.0), mats[by_key(KEPT_ACROSS, min(d, p.keys - 1u), 0u) / 4u + r], d < p.keys);
}
fn next_gradient(d: u32, c: u32) -> vec4<f32> {
  return dstates[cell(chunk + 1u, min(d, p.keys - 1u), 0u) / 4u + place(c)];
}
fn asked(r: u32, i: u32) -> vec4<f32> { return mats[by_token(ASKED, i, 0u) / 4u + min(deep + r, keys4() - 1u)]; }
fn less_decayed(r: u32, i: u32) -> vec4<f32> {
  return -mats[by_token(DECAYED_ALONG, i, 0u) / 4u + min(deep + r, keys4() - 1u)];
}
fn new_gradient(i: u32, c: u32) -> vec4<f32> { return values[second(i, 0u) / 4u + place(c)]; }
// Not 0 beyond the last token: `asked` is.
fn output_gradient(i: u32, c: u32) -> vec4<f32> {
  let at = ((row + min(i, count - 1u)) * p.heads + head % p.heads) * p.values;
  let first = 4u * (column + c);
  let last = p.values - 1u;
  return vec4<f32>(
    f32(dy[at + min(first, last)]), f32(dy[at + min(first + 1u, last)]),
    f32(dy[at + min(first + 2u, last)]), f32(dy[at + min(first + 3u, last)]),
  );
}

@compute @workgroup_size($INVOCATIONS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#include "delta_rule.inc.wgsl" begin
  column = group % p.tiles * ACROSS;
  let there = column + tx < values4();
  for (var after = p.chunks; after > 0u; after--) {
    choose(group / p.tiles, after - 1u);
    load_gates(lid);
    var tile = zeros();
#include "delta_rule.inc.wgsl" add4 lhs=kept_across rhs=next_gradient inner=p.keys
#include "delta_rule.inc.wgsl" fold
    for (var n = share; n < 4u && there; n += SPLIT) { values[second(i + n, 0u) / 4u + column + tx] += folded(n, lid); }
    storageBarrier();
    let whole = inside[count - 1u];
    for (var part = 0u; part < p.keys; part += 64u) {
      deep = part / 4u;
      tile = zeros();
#include "delta_rule.inc.wgsl" add4 lhs=asked rhs=output_gradient inner=CHUNK
#if CORRECTED
#include "delta_rule.inc.wgsl" add4 lhs=less_decayed rhs=new_gradient inner=CHUNK
#endif
#include "delta_rule.inc.wgsl" fold
      for (var n = share; n < 4u && there; n += SPLIT) {
        if (part + i + n < p.keys) {
          let later = whole * dstates[cell(chunk + 1u, part + i + n, 0u) / 4u + column + tx];
          dstates[cell(chunk, part + i + n, 0u) / 4u + column + tx] = later + folded(n, lid);
        }
      }
    }
    storageBarrier();
  }
}
