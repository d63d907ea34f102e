// Parts of delta_rule_grads.wgsl and ssd_grads.wgsl, which include delta_rule.inc.wgsl before them.

#part gradients
// Part of the gradient kernels: operands, and sums over invocations.
var<workgroup> dsums: array<f32, CHUNK>;
var<private> deep: u32;  // the first of 64 rows of a state, or of columns
var<workgroup> partial: array<f32, 1024>;

// In matmuls over the columns of values, the left operand is 0 beyond the last.
fn output_gradient(i: u32, c: u32) -> f32 {
  let at = ((row + min(i, count - 1u)) * p.heads + head % p.heads) * p.values + min(c, p.values - 1u);
  return select(0.0, f32(dy[at]), i < count && c < p.values);
}
fn new_value(i: u32, c: u32) -> f32 { return select(0.0, values[token(i, min(c, p.values - 1u))], c < p.values); }
fn new_across(c: u32, i: u32) -> f32 { return values[token(i, min(c, p.values - 1u))]; }
fn state_across(c: u32, d: u32) -> f32 {
  return states[cell(chunk, min(deep + d, p.keys - 1u), min(c, p.values - 1u))];
}
fn next_across(c: u32, d: u32) -> f32 {
  return dstates[cell(chunk + 1u, min(deep + d, p.keys - 1u), min(c, p.values - 1u))];
}
fn score_gradient(i: u32, j: u32) -> f32 { return mats[square(SCORES, i, j)]; }
fn score_across(j: u32, i: u32) -> f32 { return mats[square(SCORES, i, j)]; }
fn deep_query(i: u32, d: u32) -> f32 { return query(i, deep + d); }
fn deep_key(i: u32, d: u32) -> f32 { return key(i, deep + d); }
fn dqk_at(i: u32, d: u32) -> u32 { return ((head * p.chunks + chunk) * CHUNK + i) * 2u * p.keys + d; }

// Sums each of 64 numbers over the 16 invocations that have a part of it. Returns number lid % 64.
fn sum_of_16(four: vec4<f32>, which: u32, place: u32, lid: u32) -> f32 {
  workgroupBarrier();
#unroll n 4
  partial[(4u * which + $nu) * 16u + place] = four[$n];
#end
  workgroupBarrier();
  var sum = 0.0;
  for (var n = 0u; n < 16u; n++) { sum += partial[16u * (lid % CHUNK) + n]; }
  return sum;
}
#endpart

#part query_gradient
    // Gradient of q: from the state, and from the chunk's keys.
    deep = part;
    tile = zeros();
#include "delta_rule.inc.wgsl" add lhs=output_gradient rhs=state_across inner=p.values lk=e%DEEP lr=e/DEEP rk=e%DEEP rc=e/DEEP
#unroll n 4
    tile.r$n = tile.r$n * inside[i + $nu];
#unroll c 4
    later[$n] += deep_query(i + $nu, j + $cu) * tile.r$n[$c];
#end
#end
#include "delta_rule.inc.wgsl" add lhs=score_gradient rhs=deep_key inner=CHUNK lk=e%DEEP lr=e/DEEP rk=e/16u rc=e%16u
#unroll n 4
#unroll c 4
    if (part + j + $cu < p.keys) { dqk[dqk_at(i + $nu, part + j + $cu)] = tile.r$n[$c]; }
#end
#end
#endpart

#part next_loop
  // Part of the loops over keys. Where registers are few there are several: with all matmuls in one loop, Intel's compiler
  // spills (bench/notes/anv.md).
#if FEW_REGISTERS
  }
  for (var part = 0u; part < p.keys; part += 64u) {
    deep = part;
#endif
#endpart

#part between
  // For each token, the sum over the pairs of tokens that it lies between (the later one included). `tile` has the
  // pairs, `of_row` the sums of its rows.
#unroll n 4
  partial[(i + $nu) * 16u + tx] = of_row[$n];
#end
  storageBarrier();
  workgroupBarrier();
  var within = vec4<f32>(0.0);
#unroll n 4
  {
    var before = 0.0;
    for (var c = 0u; c < tx; c++) { before += partial[(i + $nu) * 16u + c]; }
#unroll c 4
    within[$c] += select(0.0, before, j + $cu <= i + $nu);
    before += tile.r$n[$c];
#end
  }
#end
  // Its sums over invocations come last, with the others: Intel's compiler would keep their addresses until then.
  var later = vec4<f32>(0.0);
  var ends = vec4<f32>(0.0);
#endpart

#part through_states
  var through = 0.0;
  for (var n = lid; n < p.keys * p.values; n += THREADS) {
    let d = n / p.values;
    let c = n % p.values;
    through += states[cell(chunk, d, c)] * dstates[cell(chunk + 1u, d, c)];
  }
#endpart

#part sum_through
  // Sixteen partial sums of what passes through the state.
  workgroupBarrier();
  if (lid < 16u) {
    var sum = 0.0;
    for (var n = 0u; n < THREADS / 16u; n++) { sum += partial[CHUNK + 16u * n + lid]; }
    partial[320u + lid] = sum * inside[count - 1u];
  }
  workgroupBarrier();
#endpart

#part gate_gradient
    // All decays that include this token: from an earlier token or the incoming state to it, a later one or the end.
    var sum = of_within;
    for (var n = 0u; n < lid; n++) { sum += partial[n]; }
    for (var n = lid; n < count; n++) { sum += dsums[n]; }
    for (var n = 0u; n < 16u; n++) { sum += partial[320u + n]; }
#endpart
