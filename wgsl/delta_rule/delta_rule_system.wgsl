// The system of each chunk of the gated delta rule: N = k k' decay below the diagonal, inverse = (1 + beta N)^-1, and
// the operands of the scan: inverse beta inside k, inverse beta v, and to_end k. Without CORRECTED there is no system,
// only beta v and to_end k.
//
// qkv [batch, tokens, channels] QKV_T; g, beta_of [batch, tokens, heads] f32; doc_start [batch, tokens] i32; cache_len
// [1] -> info, mats, values (plane 0): inverse beta v.
// Dispatch: a workgroup per chunk of each head.
#include "delta_rule.inc.wgsl" chunk
@group(0) @binding(1) var<storage, read> qkv: array<QKV_T>;
@group(0) @binding(2) var<storage, read> g: array<f32>;
@group(0) @binding(3) var<storage, read> beta_of: array<f32>;
@group(0) @binding(4) var<storage, read> doc_start: array<i32>;
@group(0) @binding(5) var<storage, read> cache_len: array<i32>;
@group(0) @binding(6) var<storage, read_write> info: array<f32>;
@group(0) @binding(7) var<storage, read_write> mats: array<f32>;
@group(0) @binding(8) var<storage, read_write> values: array<f32>;
#include "delta_rule.inc.wgsl" loads
#include "delta_rule.inc.wgsl" gates
#include "delta_rule.inc.wgsl" staged

#if CORRECTED
var<workgroup> partial: array<vec2<f32>, 256>;
var<workgroup> between: array<f32, 768>;

var<private> first: u32;  // column of the tile

fn system(i: u32, j: u32) -> f32 { return mats[square(SYSTEM, i, j)]; }
fn inverse(i: u32, n: u32) -> f32 { return mats[square(INVERSE, i, n)]; }
fn weighted_key(i: u32, d: u32) -> f32 { return key(i, first + d) * beta[i] * inside[i]; }
fn weighted_value(i: u32, c: u32) -> f32 { return value(i, first + c) * beta[i]; }
fn key_across(d: u32, j: u32) -> f32 { return key(j, d); }

// Sums of squares of the chunk's q and k, four invocations per token.
fn squares(lid: u32) -> vec2<f32> {
  let i = lid / 4u;
  var sum = vec2<f32>(0.0);
  if (i < count) {
    for (var d = lid % 4u; d < p.keys; d += 4u) {
      let x = vec2<f32>(f32(qkv[channel(i, key_head() * p.keys + d)]), f32(qkv[channel(i, key_width() + key_head() * p.keys + d)]));
      sum += x * x;
    }
  }
  return sum;
}
#endif

@compute @workgroup_size($INVOCATIONS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
#include "delta_rule.inc.wgsl" begin
  choose(group / p.chunks, group % p.chunks);
#if CORRECTED
  partial[lid] = squares(lid);
#endif
#include "delta_rule.inc.wgsl" read_gates
#if CORRECTED
    let length = partial[4u * lid] + partial[4u * lid + 1u] + partial[4u * lid + 2u] + partial[4u * lid + 3u];
#endif
#include "delta_rule.inc.wgsl" write_gates
#if CORRECTED
  var tile = zeros();
#include "delta_rule.inc.wgsl" add lhs=key rhs=key_across inner=p.keys lk=e%DEEP lr=e/DEEP rk=e%DEEP rc=e/DEEP
#unroll i 4
#unroll c 4
  mats[square(SYSTEM, i + $iu, j + $cu)] = select(0.0, tile.r$i[$c] * decay(i + $iu, j + $cu), j + $cu < i + $iu);
#end
#end
  for (var e = lid; e < SQUARE; e += THREADS) { mats[square(INVERSE, 0u, e)] = 0.0; }
  storageBarrier();
#include "delta_rule.inc.wgsl" diagonal_blocks of=system
#include "delta_rule.inc.wgsl" blocks_below
  storageBarrier();
  load_gates(lid);
  for (var part = 0u; part < p.keys; part += COLUMNS) {
    first = part;
    tile = zeros();
#include "delta_rule.inc.wgsl" add lhs=inverse rhs=weighted_key inner=CHUNK lk=e%DEEP lr=e/DEEP rk=e/ACROSS rc=e%ACROSS
#unroll n 4
#unroll c 4
    if (part + j + $cu < p.keys) {
      mats[by_key(DECAYED, part + j + $cu, i + $nu)] = tile.r$n[$c];
#if PLANES == 5
      mats[by_token(DECAYED_ALONG, i + $nu, part + j + $cu)] = tile.r$n[$c];
#endif
    }
#end
#end
  }
  for (var part = 0u; part < p.values; part += COLUMNS) {
    first = part;
    tile = zeros();
#include "delta_rule.inc.wgsl" add lhs=inverse rhs=weighted_value inner=CHUNK lk=e%DEEP lr=e/DEEP rk=e/ACROSS rc=e%ACROSS
#unroll n 4
#unroll c 4
    if (part + j + $cu < 4u * values4()) { values[token(i + $nu, part + j + $cu)] = tile.r$n[$c]; }
#end
#end
  }
#else
  load_gates(lid);
  for (var e = lid; e < CHUNK * 4u * values4(); e += THREADS) {
    let n = e / (4u * values4());
    let c = e % (4u * values4());
    values[token(n, c)] = value(n, c) * beta[n];
  }
#endif
  let row_length = 4u * keys4();
  for (var e = lid; e < CHUNK * row_length; e += THREADS) {
    let n = e / row_length;
    let d = e % row_length;
    let stays = key(n, d) * to_end[n];
    mats[by_token(KEPT, n, d)] = stays;
#if PLANES == 5
    mats[by_token(ASKED, n, d)] = query(n, d) * inside[n];
    if (d < p.keys) { mats[by_key(KEPT_ACROSS, d, n)] = stays; }
#endif
  }
}
