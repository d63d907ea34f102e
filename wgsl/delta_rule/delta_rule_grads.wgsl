// Gradients of q, k and the gates of each chunk of the gated delta rule, from those of its states and its new values
// (`_chunk_grads` in autograd/ops/delta_rule.py).
//
// qkv [batch, tokens, channels] QKV_T; info: planes 5 and 6 are overwritten; mats: system and scores are overwritten;
// values: plane 1 is the gradient of new, and overwritten with inverse' of it; states, dstates; dy [batch, tokens,
// heads, VALUES] DY_T; dqk [batch heads, chunks CHUNK, 2 KEYS] f32: overwritten.
// Dispatch: a workgroup for each chunk of each head.
#include "delta_rule.inc.wgsl" chunk
@group(0) @binding(1) var<storage, read> qkv: array<QKV_T>;
@group(0) @binding(2) var<storage, read_write> info: array<f32>;
@group(0) @binding(3) var<storage, read_write> mats: array<f32>;
@group(0) @binding(4) var<storage, read_write> values: array<f32>;
@group(0) @binding(5) var<storage, read> states: array<f32>;
@group(0) @binding(6) var<storage, read> dstates: array<f32>;
@group(0) @binding(7) var<storage, read> dy: array<DY_T>;
@group(0) @binding(8) var<storage, read_write> dqk: array<f32>;
#include "delta_rule.inc.wgsl" gates
#include "delta_rule.inc.wgsl" loads
#include "delta_rule.inc.wgsl" staged

var<workgroup> dbeta: array<f32, CHUNK>;

fn rhs_gradient(i: u32, c: u32) -> f32 { return select(0.0, values[second(i, min(c, p.values - 1u))], c < p.values); }
fn inverse_across(i: u32, n: u32) -> f32 { return mats[square(INVERSE, n, i)]; }
fn new_gradient(i: u32, c: u32) -> f32 { return values[second(i, min(deep + c, p.values - 1u))]; }
fn system_gradient(i: u32, j: u32) -> f32 { return mats[square(SYSTEM, i, j)] + mats[square(SYSTEM, j, i)]; }

#include "delta_rule_grads.inc.wgsl" gradients

@compute @workgroup_size($INVOCATIONS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#include "delta_rule.inc.wgsl" begin
  choose(group / p.chunks, group % p.chunks);
  load_gates(lid);
  var tile = zeros();
  // The gradient of the system's right-hand side, in place of that of new.
  for (var part = 0u; part < p.values; part += COLUMNS) {
    deep = part;
    tile = zeros();
#include "delta_rule.inc.wgsl" add lhs=inverse_across rhs=new_gradient inner=CHUNK lk=e/16u lr=e%16u rk=e/ACROSS rc=e%ACROSS
#unroll n 4
#unroll c 4
    if (part + j + $cu < p.values) { values[second(i + $nu, part + j + $cu)] = tile.r$n[$c]; }
#end
#end
  }
  storageBarrier();
  tile = zeros();
#include "delta_rule.inc.wgsl" add lhs=output_gradient rhs=new_across inner=p.values lk=e%DEEP lr=e/DEEP rk=e%DEEP rc=e/DEEP
  let by_scores = tile;
  tile = zeros();
#include "delta_rule.inc.wgsl" add lhs=rhs_gradient rhs=new_across inner=p.values lk=e%DEEP lr=e/DEEP rk=e%DEEP rc=e/DEEP
  // Sums over pairs of tokens: gradients of the decay between them, and of beta.
  var of_row = vec4<f32>(0.0);
  var rates = vec4<f32>(0.0);
#unroll n 4
#unroll c 4
  {
    let system = square(SYSTEM, i + $nu, j + $cu);
    let scores = square(SCORES, i + $nu, j + $cu);
    let left_over = decay(i + $nu, j + $cu);
    let by_system = select(0.0, -tile.r$n[$c], j + $cu < i + $nu);
    let rate = by_system * mats[system];
    let pair = by_scores.r$n[$c] * mats[scores] + beta[i + $nu] * rate;
    of_row[$n] += pair;
    rates[$n] += rate;
    mats[system] = beta[i + $nu] * by_system * left_over;
    mats[scores] = by_scores.r$n[$c] * left_over;
    tile.r$n[$c] = pair;
  }
#end
#end
#include "delta_rule_grads.inc.wgsl" between
  for (var part = 0u; part < p.keys; part += 64u) {
#include "delta_rule_grads.inc.wgsl" query_gradient
#include "delta_rule_grads.inc.wgsl" next_loop
    tile = zeros();
#include "delta_rule.inc.wgsl" add lhs=rhs_gradient rhs=state_across inner=p.values lk=e%DEEP lr=e/DEEP rk=e%DEEP rc=e/DEEP
#unroll n 4
    tile.r$n = tile.r$n * -inside[i + $nu];
#unroll c 4
    rates[$n] += deep_key(i + $nu, j + $cu) * tile.r$n[$c];
    later[$n] += beta[i + $nu] * deep_key(i + $nu, j + $cu) * tile.r$n[$c];
#end
    tile.r$n = tile.r$n * beta[i + $nu];
#end
#if FEW_REGISTERS
    // The addend of the next matmul waits in memory.
#unroll n 4
#unroll c 4
    if (part + j + $cu < p.keys) { dqk[dqk_at(i + $nu, p.keys + part + j + $cu)] = tile.r$n[$c]; }
#end
#end
  }
  for (var part = 0u; part < p.keys; part += 64u) {
    deep = part;
#else
    let by_wanted = tile;
#endif
    tile = zeros();
#include "delta_rule.inc.wgsl" add lhs=new_value rhs=next_across inner=p.values lk=e%DEEP lr=e/DEEP rk=e%DEEP rc=e/DEEP
#unroll n 4
    tile.r$n = tile.r$n * to_end[i + $nu];
#unroll c 4
    ends[$n] += deep_key(i + $nu, j + $cu) * tile.r$n[$c];
#end
#if FEW_REGISTERS
#unroll c 4
    tile.r$n[$c] += dqk[dqk_at(i + $nu, p.keys + min(part + j + $cu, p.keys - 1u))];
#end
#else
    tile.r$n += by_wanted.r$n;
#endif
#end
#include "delta_rule.inc.wgsl" add lhs=system_gradient rhs=deep_key inner=CHUNK lk=e%DEEP lr=e/DEEP rk=e/16u rc=e%16u
#include "delta_rule.inc.wgsl" add lhs=score_across rhs=deep_query inner=CHUNK lk=e/16u lr=e%16u rk=e/16u rc=e%16u
#unroll n 4
#unroll c 4
    if (part + j + $cu < p.keys) { dqk[dqk_at(i + $nu, p.keys + part + j + $cu)] = tile.r$n[$c]; }
#end
#end
  }
  // The inner product of the state and the gradient of the next one.
#include "delta_rule_grads.inc.wgsl" through_states
  let of_within = sum_of_16(within, tx, ty, lid);
  let of_later = sum_of_16(later, ty, tx, lid);
  let of_rates = sum_of_16(rates, ty, tx, lid);
  let of_ends = sum_of_16(ends, ty, tx, lid);
  workgroupBarrier();
  if (lid < CHUNK) {
    dsums[lid] = of_later;
    dbeta[lid] = of_rates;
    partial[lid] = of_ends;
  }
  partial[CHUNK + lid] = through;
#include "delta_rule_grads.inc.wgsl" sum_through
  if (lid < count) {
#include "delta_rule_grads.inc.wgsl" gate_gradient
    info[plane(5u, lid)] = sum;
    var rate = dbeta[lid];
    for (var c = 0u; c < p.values; c++) { rate += rhs_gradient(lid, c) * value(lid, c); }
    info[plane(6u, lid)] = rate;
  }
}
