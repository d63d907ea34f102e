// delta_rule_system.wgsl on tensor cores: N = k k' decay below the diagonal, inverse = (1 + beta N)^-1, inverse beta v;
// and the operands of the scans, in f16: inverse beta inside k, to_end k, and for a backward inside q and both in the
// other layout.
//
// qkv [batch, tokens, channels] f16; g, beta_of [batch, tokens, heads] f32; doc_start [batch, tokens] i32; cache_len
// [1] -> info, mats, values (plane 0), operands.
// Dispatch: a workgroup per chunk of each head.
enable f16;
enable wgpu_cooperative_matrix;
#include "delta_rule.inc.wgsl" chunk
@group(0) @binding(1) var<storage, read> qkv: array<vec4<f16>>;
@group(0) @binding(2) var<storage, read> g: array<f32>;
@group(0) @binding(3) var<storage, read> beta_of: array<f32>;
@group(0) @binding(4) var<storage, read> doc_start: array<i32>;
@group(0) @binding(5) var<storage, read> cache_len: array<i32>;
@group(0) @binding(6) var<storage, read_write> info: array<f32>;
@group(0) @binding(7) var<storage, read_write> mats: array<f32>;
@group(0) @binding(8) var<storage, read_write> values: array<vec4<f32>>;
@group(0) @binding(9) var<storage, read_write> operands: array<vec4<f16>>;
#include "delta_rule.inc.wgsl" gates
#include "delta_rule_matrix.inc.wgsl" products
#include "delta_rule_matrix.inc.wgsl" fours

var<workgroup> between: array<f32, 768>;

var<private> first: u32;  // four columns of the tile

fn system(i: u32, j: u32) -> f32 { return strips[16u * i + j / 4u][j % 4u]; }
fn inverse(i: u32, n: u32) -> vec4<f32> {
  let at = square(INVERSE, i, 4u * n);
  return vec4<f32>(mats[at], mats[at + 1u], mats[at + 2u], mats[at + 3u]);
}
fn weighted_key(i: u32, d: u32) -> vec4<f32> { return key(i, first + d) * (beta[i] * inside[i]); }
fn weighted_value(i: u32, c: u32) -> vec4<f32> { return value(i, first + c) * beta[i]; }

// Sums of squares of a quarter of a token's q and k.
fn squares(lid: u32) -> vec2<f32> {
  var sum = vec2<f32>(0.0);
  let at = channels(lid / 4u);
  for (var d = lid % 4u; d < keys4(); d += 4u) {
    let q = vec4<f32>(qkv[at + query4 + d]);
    let k = vec4<f32>(qkv[at + key4 + d]);
    sum += vec2<f32>(dot(q, q), dot(k, k));
  }
  return sum;
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#include "delta_rule_matrix.inc.wgsl" place
  place_channels();
  strips[lid] = vec4<f32>(squares(lid), 0.0, 0.0);
#include "delta_rule.inc.wgsl" read_gates
    let length = strips[4u * lid] + strips[4u * lid + 1u] + strips[4u * lid + 2u] + strips[4u * lid + 3u];
#include "delta_rule.inc.wgsl" write_gates
  var tile: Tile;
#include "delta_rule_matrix.inc.wgsl" sums
#include "delta_rule_matrix.inc.wgsl" along_both lhs=key rhs=key inner=p.keys
#include "delta_rule_matrix.inc.wgsl" summed
#unroll n 4
  {
    let below = select(vec4<f32>(0.0), tile.r$n * decays(i + $nu, j), vec4<u32>(j, j + 1u, j + 2u, j + 3u) < vec4<u32>(i + $nu));
    strips[16u * (i + $nu) + tx] = below;
#unroll c 4
    mats[square(SYSTEM, i + $nu, j + $cu)] = below[$c];
    mats[square(INVERSE, i + $nu, j + $cu)] = 0.0;
#end
  }
#end
  workgroupBarrier();
  storageBarrier();
#include "delta_rule.inc.wgsl" diagonal_blocks of=system
#include "delta_rule.inc.wgsl" blocks_below
  storageBarrier();
  load_gates(lid);
  for (var part = 0u; part < keys4(); part += 16u) {
    first = part;
#include "delta_rule_matrix.inc.wgsl" sums
#include "delta_rule_matrix.inc.wgsl" along_left lhs=inverse rhs=weighted_key inner=CHUNK
#include "delta_rule_matrix.inc.wgsl" summed
#unroll n 4
    operands[operand(DECAYED) + (4u * part + j + $nu) * 16u + ty] =
      vec4<f16>(vec4<f32>(tile.r0[$n], tile.r1[$n], tile.r2[$n], tile.r3[$n]));
#if PLANES == 5
    operands[operand(DECAYED_ALONG) + (i + $nu) * keys4() + part + tx] = vec4<f16>(tile.r$n);
#endif
#end
  }
  for (var part = 0u; part < values4(); part += 16u) {
    first = part;
#include "delta_rule_matrix.inc.wgsl" sums
#include "delta_rule_matrix.inc.wgsl" along_left lhs=inverse rhs=weighted_value inner=CHUNK
#include "delta_rule_matrix.inc.wgsl" summed
#unroll n 4
    values[token(i + $nu, 0u) / 4u + part + tx] = tile.r$n;
#end
  }
  for (var e = lid; e < CHUNK * keys4(); e += 256u) {
    let n = e / keys4();
    operands[operand(KEPT) + e] = vec4<f16>(key(n, e % keys4()) * to_end[n]);
#if PLANES == 5
    operands[operand(ASKED) + e] = vec4<f16>(query(n, e % keys4()) * inside[n]);
#endif
  }
#if PLANES == 5
  // Blocks of four keys of four tokens, transposed.
  for (var e = lid; e < 16u * keys4(); e += 256u) {
    let n = e / keys4() * 4u;
#unroll n 4
    let kept_$n = key(n + $nu, e % keys4()) * to_end[n + $nu];
#end
#unroll d 4
    operands[operand(KEPT_ACROSS) + (e % keys4() * 4u + $du) * 16u + n / 4u] =
      vec4<f16>(vec4<f32>(kept_0[$d], kept_1[$d], kept_2[$d], kept_3[$d]));
#end
  }
#endif
}
