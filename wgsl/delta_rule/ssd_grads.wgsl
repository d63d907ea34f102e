// Gradients of B, C, dt, g and skip of each chunk of Mamba-2's recurrence, from those of its states and of what its
// tokens add to them (`_chunk_grads` in autograd/ops/ssd.py). Here C is q, B is k, x is v (delta_rule.inc.wgsl).
//
// qkv [batch, tokens, channels] QKV_T; info: planes 5, 6 and 7 are overwritten; mats: scores are overwritten; values:
// new, and its gradient; states, dstates; dy [batch, tokens, heads, VALUES] DY_T; dqk [batch heads, chunks CHUNK, 2
// KEYS] f32: overwritten.
// Dispatch: a workgroup per chunk of each head.
#include "delta_rule.inc.wgsl" chunk
@group(0) @binding(1) var<storage, read> qkv: array<QKV_T>;
@group(0) @binding(2) var<storage, read_write> info: array<f32>;
@group(0) @binding(3) var<storage, read_write> mats: array<f32>;
@group(0) @binding(4) var<storage, read> values: array<f32>;
@group(0) @binding(5) var<storage, read> states: array<f32>;
@group(0) @binding(6) var<storage, read> dstates: array<f32>;
@group(0) @binding(7) var<storage, read> dy: array<DY_T>;
@group(0) @binding(8) var<storage, read_write> dqk: array<f32>;
#include "delta_rule.inc.wgsl" gates
#include "delta_rule.inc.wgsl" loads
#include "delta_rule.inc.wgsl" staged

#include "delta_rule_grads.inc.wgsl" gradients

@compute @workgroup_size($INVOCATIONS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#include "delta_rule.inc.wgsl" begin
  choose(group / p.chunks, group % p.chunks);
  load_gates(lid);
  var tile = zeros();
#include "delta_rule.inc.wgsl" add lhs=output_gradient rhs=new_across inner=p.values lk=e%DEEP lr=e/DEEP rk=e%DEEP rc=e/DEEP
  var of_row = vec4<f32>(0.0);
#unroll n 4
#unroll c 4
  {
    let scores = square(SCORES, i + $nu, j + $cu);
    let pair = tile.r$n[$c] * mats[scores];
    of_row[$n] += pair;
    mats[scores] = tile.r$n[$c] * decay(i + $nu, j + $cu);
    tile.r$n[$c] = pair;
  }
#end
#end
#include "delta_rule_grads.inc.wgsl" between
  for (var part = 0u; part < p.keys; part += 64u) {
#include "delta_rule_grads.inc.wgsl" query_gradient
#include "delta_rule_grads.inc.wgsl" next_loop
    tile = zeros();
#include "delta_rule.inc.wgsl" add lhs=new_value rhs=next_across inner=p.values lk=e%DEEP lr=e/DEEP rk=e%DEEP rc=e/DEEP
#unroll n 4
    tile.r$n = tile.r$n * to_end[i + $nu];
#unroll c 4
    ends[$n] += deep_key(i + $nu, j + $cu) * tile.r$n[$c];
#end
#end
#include "delta_rule.inc.wgsl" add lhs=score_across rhs=deep_query inner=CHUNK lk=e/16u lr=e%16u rk=e/16u rc=e%16u
#unroll n 4
#unroll c 4
    if (part + j + $cu < p.keys) { dqk[dqk_at(i + $nu, p.keys + part + j + $cu)] = tile.r$n[$c]; }
#end
#end
  }
  // Inner products: of the state and the gradient of the next one, and of each token's x and the gradients of new and
  // y.
#include "delta_rule_grads.inc.wgsl" through_states
  var by_x = vec2<f32>(0.0);
  for (var c = lid % 4u; c < p.values; c += 4u) {
    by_x += value(lid / 4u, c) * vec2<f32>(values[second(lid / 4u, c)], output_gradient(lid / 4u, c));
  }
  let of_within = sum_of_16(within, tx, ty, lid);
  let of_later = sum_of_16(later, ty, tx, lid);
  let of_ends = sum_of_16(ends, ty, tx, lid);
  workgroupBarrier();
  if (lid < CHUNK) {
    dsums[lid] = of_later;
    partial[lid] = of_ends;
  }
  partial[CHUNK + lid] = through;
  partial[512u + lid] = by_x.x;
  partial[768u + lid] = by_x.y;
#include "delta_rule_grads.inc.wgsl" sum_through
  if (lid < count) {
#include "delta_rule_grads.inc.wgsl" gate_gradient
    info[plane(5u, lid)] = sum;
    let at = 4u * lid;
    info[plane(6u, lid)] = partial[512u + at] + partial[513u + at] + partial[514u + at] + partial[515u + at];
    info[plane(7u, lid)] = partial[768u + at] + partial[769u + at] + partial[770u + at] + partial[771u + at];
  }
}
