// delta_rule_grads.wgsl on tensor cores: gradients of q, k and the gates of each chunk.
//
// Arrays as there, but qkv [batch, tokens, channels] and dy [batch, tokens, heads, VALUES] are f16.
// Dispatch: a workgroup for each chunk of each head.
enable f16;
enable wgpu_cooperative_matrix;
#include "delta_rule.inc.wgsl" chunk
@group(0) @binding(1) var<storage, read> qkv: array<vec4<f16>>;
@group(0) @binding(2) var<storage, read_write> info: array<f32>;
@group(0) @binding(3) var<storage, read_write> mats: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> values: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> states: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> dstates: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read> dy: array<vec4<f16>>;
@group(0) @binding(8) var<storage, read_write> dqk: array<vec4<f32>>;
#include "delta_rule.inc.wgsl" gates
#include "delta_rule_matrix.inc.wgsl" products
#include "delta_rule_matrix.inc.wgsl" fours

var<workgroup> dsums: array<f32, CHUNK>;
var<private> deep: u32;  // the first four of 64 rows of a state, or of columns

// Left operands: 0 beyond the last token.
fn output_gradient(i: u32, c: u32) -> vec4<f32> {
  let x = dy[((row + min(i, count - 1u)) * p.heads + head % p.heads) * values4() + c];
  return select(vec4<f32>(0.0), vec4<f32>(x), i < count);
}
fn inverse_across(n: u32, i: u32) -> vec4<f32> { return mats[square(INVERSE, n, 0u) / 4u + i]; }
fn system_gradient(i: u32, j: u32) -> vec4<f32> { return mats[square(SYSTEM, i, 0u) / 4u + j]; }
fn score_gradient(i: u32, j: u32) -> vec4<f32> { return mats[square(SCORES, i, 0u) / 4u + j]; }
fn new_value(i: u32, c: u32) -> vec4<f32> { return values[token(i, 0u) / 4u + c]; }
fn rhs_gradient(i: u32, c: u32) -> vec4<f32> { return values[second(i, 0u) / 4u + c]; }
fn new_gradient(i: u32, c: u32) -> vec4<f32> { return rhs_gradient(i, deep + c); }
fn state_across(d: u32, c: u32) -> vec4<f32> { return states[cell(chunk, 4u * deep + d, 0u) / 4u + c]; }
fn next_across(d: u32, c: u32) -> vec4<f32> { return dstates[cell(chunk + 1u, 4u * deep + d, 0u) / 4u + c]; }
fn deep_query(i: u32, d: u32) -> vec4<f32> { return query(i, deep + d); }
fn deep_key(i: u32, d: u32) -> vec4<f32> { return key(i, deep + d); }
fn dqk_at(i: u32, d: u32) -> u32 { return ((head * p.chunks + chunk) * CHUNK + i) * 2u * keys4() + d; }
fn sum4(x: vec4<f32>) -> f32 { return dot(x, vec4<f32>(1.0)); }

// Sums each of 64 numbers over the 16 invocations that have a part of it, in `strips`. Returns number lid % 64.
fn sum_of_16(four: vec4<f32>, which: u32, place: u32, lid: u32) -> f32 {
  workgroupBarrier();
#unroll n 4
  strips[(4u * which + $nu) * 4u + place / 4u][place % 4u] = four[$n];
#end
  workgroupBarrier();
  let at = lid % CHUNK * 4u;
  return sum4(strips[at] + strips[at + 1u] + strips[at + 2u] + strips[at + 3u]);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#include "delta_rule_matrix.inc.wgsl" place
  place_channels();
  load_gates(lid);
  var tile: Tile;
  // The gradient of the system's right-hand side, in place of that of new.
  for (var part = 0u; part < values4(); part += 16u) {
    deep = part;
#include "delta_rule_matrix.inc.wgsl" sums
#include "delta_rule_matrix.inc.wgsl" along_none lhs=inverse_across rhs=new_gradient inner=CHUNK
#include "delta_rule_matrix.inc.wgsl" summed
#unroll n 4
    values[second(i + $nu, 0u) / 4u + part + tx] = tile.r$n;
#end
  }
  storageBarrier();
#include "delta_rule_matrix.inc.wgsl" sums
#include "delta_rule_matrix.inc.wgsl" along_both lhs=output_gradient rhs=new_value inner=p.values
#include "delta_rule_matrix.inc.wgsl" summed
  let by_scores = tile;
#include "delta_rule_matrix.inc.wgsl" sums
#include "delta_rule_matrix.inc.wgsl" along_both lhs=rhs_gradient rhs=new_value inner=p.values
#include "delta_rule_matrix.inc.wgsl" summed
  // Sums over pairs of tokens: by the later one, by the earlier one, and for beta.
  var later = vec4<f32>(0.0);
  var earlier = vec4<f32>(0.0);
  var rates = vec4<f32>(0.0);
  let across = vec4<u32>(j, j + 1u, j + 2u, j + 3u);
#unroll n 4
  {
    let system = square(SYSTEM, i + $nu, j) / 4u;
    let scores = square(SCORES, i + $nu, j) / 4u;
    let left_over = decays(i + $nu, j);
    let by_system = select(vec4<f32>(0.0), -tile.r$n, across < vec4<u32>(i + $nu));
    let rate = by_system * mats[system];
    // A token's pair with itself has no decay. It is left out of both sums, whose difference then keeps more digits
    // than f16 operands have.
    let earlier_scores = select(vec4<f32>(0.0), by_scores.r$n * mats[scores], across < vec4<u32>(i + $nu));
    let pair = earlier_scores + beta[i + $nu] * rate;
    later[$n] += sum4(pair);
    earlier += pair;
    rates[$n] += sum4(rate);
    mats[system] = beta[i + $nu] * by_system * left_over;
    mats[scores] = by_scores.r$n * left_over;
  }
#end
  storageBarrier();
  var ends = vec4<f32>(0.0);
  for (var part = 0u; part < keys4(); part += 16u) {
    deep = part;
    // Gradient of q: from the state, and from the chunk's keys.
#include "delta_rule_matrix.inc.wgsl" sums
#include "delta_rule_matrix.inc.wgsl" along_both lhs=output_gradient rhs=state_across inner=p.values
#include "delta_rule_matrix.inc.wgsl" summed
    var made = tile;
#unroll n 4
    made.r$n *= inside[i + $nu];
    later[$n] += dot(deep_query(i + $nu, tx), made.r$n);
#end
#include "delta_rule_matrix.inc.wgsl" sums
#include "delta_rule_matrix.inc.wgsl" along_left lhs=score_gradient rhs=deep_key inner=CHUNK
#include "delta_rule_matrix.inc.wgsl" summed
#unroll n 4
    dqk[dqk_at(i + $nu, part + tx)] = made.r$n + tile.r$n;
#end
    // Gradient of k: from the right-hand side, the next state, and the chunk's queries and keys.
#include "delta_rule_matrix.inc.wgsl" sums
#include "delta_rule_matrix.inc.wgsl" along_both lhs=rhs_gradient rhs=state_across inner=p.values
#include "delta_rule_matrix.inc.wgsl" summed
#unroll n 4
    made.r$n = tile.r$n * -inside[i + $nu];
    {
      let along = dot(deep_key(i + $nu, tx), made.r$n);
      rates[$n] += along;
      later[$n] += beta[i + $nu] * along;
    }
    made.r$n *= beta[i + $nu];
#end
#include "delta_rule_matrix.inc.wgsl" sums
#include "delta_rule_matrix.inc.wgsl" along_both lhs=new_value rhs=next_across inner=p.values
#include "delta_rule_matrix.inc.wgsl" summed
#unroll n 4
    tile.r$n *= to_end[i + $nu];
    ends[$n] += dot(deep_key(i + $nu, tx), tile.r$n);
    made.r$n += tile.r$n;
#end
#include "delta_rule_matrix.inc.wgsl" sums
#include "delta_rule_matrix.inc.wgsl" along_left lhs=system_gradient rhs=deep_key inner=CHUNK
#include "delta_rule_matrix.inc.wgsl" along_none lhs=system_gradient rhs=deep_key inner=CHUNK
#include "delta_rule_matrix.inc.wgsl" along_none lhs=score_gradient rhs=deep_query inner=CHUNK
#include "delta_rule_matrix.inc.wgsl" summed
#unroll n 4
    dqk[dqk_at(i + $nu, keys4() + part + tx)] = made.r$n + tile.r$n;
#end
  }
  // The inner product of the state and the gradient of the next one. Like all `ends`, it belongs to the last token's
  // sum.
  var through = vec4<f32>(0.0);
  for (var n = lid; n < p.keys * values4(); n += 256u) {
    through += states[cell(chunk, 0u, 0u) / 4u + n] * dstates[cell(chunk + 1u, 0u, 0u) / 4u + n];
  }
  let whole = select(0.0, inside[count - 1u], start[count - 1u] < 0.0);
  let of_later = sum_of_16(later - ends, ty, tx, lid);
  let of_earlier = sum_of_16(earlier, tx, ty, lid);
  let of_rates = sum_of_16(rates, ty, tx, lid);
  let of_ends = sum_of_16(ends + whole * through, ty, tx, lid);
  // Gradient of beta by the right-hand side beta v.
  var by_values = 0.0;
  for (var c = lid % 4u; c < values4(); c += 4u) { by_values += dot(rhs_gradient(lid / 4u, c), value(lid / 4u, c)); }
  workgroupBarrier();
  strips[64u + lid / 4u][lid % 4u] = by_values;
  if (lid < CHUNK) {
    dsums[lid] = of_later - of_earlier;
    strips[lid / 4u][lid % 4u] = of_ends;
  }
  workgroupBarrier();
  if (lid == 0u) {
    var all = vec4<f32>(0.0);
    for (var n = 0u; n < 16u; n++) { all += strips[n]; }
    dsums[count - 1u] += sum4(all);
  }
  workgroupBarrier();
  if (lid < count) {
    var sum = 0.0;
    for (var n = lid; n < count; n++) { sum += select(0.0, dsums[n], f32(lid) >= start[n]); }
    info[plane(5u, lid)] = sum;
    info[plane(6u, lid)] = of_rates + sum4(strips[64u + lid]);
  }
}
