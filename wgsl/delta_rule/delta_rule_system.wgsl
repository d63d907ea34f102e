// The system of each chunk of the gated delta rule: N = k k' decay below the diagonal, inverse(1 + beta N), and what the scan
// needs of it: inverse beta inside k, inverse beta v, and to_end k. Without CORRECTED there is no system: beta v, and to_end k.
//
// qkv [batch, tokens, channels] QKV_T; g, beta_of [batch, tokens, heads] f32; doc_start [batch, tokens] i32; cache_len [1]
// -> info, mats, values (plane 0): inverse beta v.
// Dispatch: a workgroup for each chunk of each head.
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

fn inverse(i: u32, n: u32) -> f32 { return mats[square(INVERSE, i, n)]; }
fn weighted_key(i: u32, d: u32) -> f32 { return key(i, first + d) * beta[i] * inside[i]; }
fn weighted_value(i: u32, c: u32) -> f32 { return value(i, first + c) * beta[i]; }
fn key_across(d: u32, j: u32) -> f32 { return key(j, d); }

// Sums of squares of the chunk's q and k, four invocations a token.
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
  if (lid < CHUNK) {
    let there = lid < count;
    let at = row + min(lid, count - 1u);
    let gate = at * p.heads + head % p.heads;
    sums[lid] = select(0.0, g[gate], there);
    beta[lid] = select(0.0, beta_of[gate], there);
    // Relative to the chunk's first token.
    let first = doc_start[at] - cache_len[0] - i32(p.at + chunk * CHUNK);
    start[lid] = f32(clamp(first, -1, i32(CHUNK)));
  }
  workgroupBarrier();
  var sum = 0.0;
  if (lid < CHUNK) {
#if CORRECTED
    let length = partial[4u * lid] + partial[4u * lid + 1u] + partial[4u * lid + 2u] + partial[4u * lid + 3u];
    q_unit[lid] = select(0.0, inverseSqrt(length.x + EPS) * p.scale, lid < count);
    k_unit[lid] = select(0.0, inverseSqrt(length.y + EPS), lid < count);
#else
    q_unit[lid] = select(0.0, 1.0, lid < count);
    k_unit[lid] = q_unit[lid];
#endif
    for (var j = u32(max(start[lid], 0.0)); j <= lid; j++) { sum += sums[j]; }
  }
  workgroupBarrier();
  if (lid < CHUNK) {
    sums[lid] = sum;
    info[plane(0u, lid)] = sum;
    info[plane(1u, lid)] = beta[lid];
    info[plane(2u, lid)] = q_unit[lid];
    info[plane(3u, lid)] = k_unit[lid];
    info[plane(4u, lid)] = start[lid];
  }
  workgroupBarrier();
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
  // Blocks of 16 on the diagonal, an invocation a column; then those below, from the diagonal away.
  if (lid < CHUNK) {
    for (var to = lid / 16u * 16u; to < lid / 16u * 16u + 16u; to++) {
      var before = 0.0;
      for (var n = lid; n < to; n++) { before += mats[square(SYSTEM, to, n)] * mats[square(INVERSE, n, lid)]; }
      mats[square(INVERSE, to, lid)] = select(-beta[to] * before, select(0.0, 1.0, to == lid), to <= lid);
    }
  }
  for (var away = 1u; away < 4u; away++) {
    storageBarrier();
    for (var e = lid; e < 256u * (4u - away); e += THREADS) {
      let c = e / 256u * 16u + e % 16u;
      let to = (e / 256u + away) * 16u + e / 16u % 16u;
      var before = 0.0;
      for (var n = e / 256u * 16u; n < (e / 256u + away) * 16u; n++) {
        before += mats[square(SYSTEM, to, n)] * mats[square(INVERSE, n, c)];
      }
      between[e] = beta[to] * before;
    }
    workgroupBarrier();
    for (var e = lid; e < 256u * (4u - away); e += THREADS) {
      let c = e / 256u * 16u + e % 16u;
      let first = (e / 256u + away) * 16u;
      let to = first + e / 16u % 16u;
      var sum = 0.0;
      for (var n = 0u; n <= to - first; n++) {
        sum += mats[square(INVERSE, to, first + n)] * between[e / 256u * 256u + n * 16u + e % 16u];
      }
      mats[square(INVERSE, to, c)] = -sum;
    }
  }
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
