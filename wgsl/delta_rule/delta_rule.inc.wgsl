// Parts of the gated delta rule (formulas: autograd/ops/delta_rule.py). Without CORRECTED they compute Mamba-2
// (autograd/ops/ssd.py): C is q, B is k, x is v and dt is beta; q and k are not normalized.

#part chunk
// Part of every kernel of chunks: the tokens of one chunk of one head, and the layout of the scratch arrays.
// `info` has planes [batch heads, chunks CHUNK]: 0 sums of g, 1 beta, 2 and 3 one over the length of q (times scale)
// and of k, 4 where the token's document starts in the chunk (-1: before it), 5 what the rounded sums leave out. The
// gradients overwrite plane 5 (g) and follow it: 6 (beta) and, without CORRECTED, 7 (skip).
// `mats` has for each chunk INVERSE (the solved system), SYSTEM and SCORES, all [CHUNK, CHUNK]. After them come DECAYED
// = inverse beta inside k and KEPT = to_end k; for a backward also both in the other layout (DECAYED_ALONG,
// KEPT_ACROSS) and ASKED = inside q. DECAYED and KEPT_ACROSS are [KEYS, CHUNK], the others [CHUNK, KEYS].
// `states` are [chunks + 1, batch heads, KEYS, VALUES]: before each chunk and after the last. `values` are two planes
// [batch heads, chunks CHUNK, VALUES]: new, and its gradient.
struct Params {
  batch: u32, tokens: u32, heads: u32, key_heads: u32,
  keys: u32, values: u32, scale: f32,  // widths of heads (KEYS, VALUES below), and what q is multiplied by
  at: u32, chunks: u32, tiles: u32,  // the first token of the segment, its chunks, and tiles of VALUES
  first: u32, end: u32,  // workgroups of this dispatch
}
@group(0) @binding(0) var<uniform> p: Params;

const CHUNK = 64u;
const EPS = 1e-6;  // of the lengths of q and k
const SQUARE = 4096u;
const INVERSE = 0u;
const SYSTEM = 1u;
const SCORES = 2u;
const DECAYED = 0u;
const KEPT = 1u;
const KEPT_ACROSS = 2u;
const ASKED = 3u;
const DECAYED_ALONG = 4u;

var<private> head: u32;  // of all batch heads
var<private> chunk: u32;
var<private> count: u32;  // tokens of the chunk
var<private> row: u32;  // of the chunk's first token, in arrays [B, T, ...]

var<workgroup> sums: array<f32, CHUNK>;
var<workgroup> beta: array<f32, CHUNK>;
var<workgroup> q_unit: array<f32, CHUNK>;
var<workgroup> k_unit: array<f32, CHUNK>;
var<workgroup> start: array<f32, CHUNK>;
var<workgroup> rests: array<f32, CHUNK>;  // what the rounded `sums` leave out

fn choose(which_head: u32, which_chunk: u32) {
  head = which_head;
  chunk = which_chunk;
  let at = p.at + chunk * CHUNK;
  count = min(CHUNK, p.tokens - at);
  row = head / p.heads * p.tokens + at;
}

fn plane(number: u32, i: u32) -> u32 {
  return ((number * p.batch * p.heads + head) * p.chunks + chunk) * CHUNK + i;
}
// Rows of scratch arrays are padded to a multiple of four numbers.
fn keys4() -> u32 { return (p.keys + 3u) / 4u; }
fn values4() -> u32 { return (p.values + 3u) / 4u; }
#if UNITS
fn region() -> u32 { return (head * p.chunks + chunk) * 3u * SQUARE; }
// Where a matrix begins in `operands`, which holds those after SCORES in vec4<f16>, in the layout of `mats`.
fn operand(number: u32) -> u32 { return ((head * p.chunks + chunk) * PLANES + number) * 16u * p.keys; }
#else
fn region() -> u32 { return (head * p.chunks + chunk) * (3u * SQUARE + PLANES * 256u * keys4()); }
#endif
fn square(number: u32, i: u32, j: u32) -> u32 { return region() + number * SQUARE + i * CHUNK + j; }
fn by_key(number: u32, d: u32, i: u32) -> u32 { return region() + 3u * SQUARE + number * 256u * keys4() + d * CHUNK + i; }
fn by_token(number: u32, i: u32, d: u32) -> u32 { return region() + 3u * SQUARE + (number * CHUNK + i) * 4u * keys4() + d; }
fn token(i: u32, c: u32) -> u32 { return 4u * ((head * p.chunks + chunk) * CHUNK + i) * values4() + c; }
// The same in the second plane of `values`.
fn second(i: u32, c: u32) -> u32 { return 4u * p.batch * p.heads * p.chunks * CHUNK * values4() + token(i, c); }
fn cell(slot: u32, d: u32, c: u32) -> u32 { return 4u * ((slot * p.batch * p.heads + head) * p.keys + d) * values4() + c; }

// Channels of a token: q and k of all key heads, and v of all heads; without CORRECTED v, k, q.
fn key_width() -> u32 { return p.key_heads * p.keys; }
#if CORRECTED
fn first_query() -> u32 { return 0u; }
fn first_key() -> u32 { return key_width(); }
fn first_value() -> u32 { return 2u * key_width(); }
#else
fn first_query() -> u32 { return p.heads * p.values + key_width(); }
fn first_key() -> u32 { return p.heads * p.values; }
fn first_value() -> u32 { return 0u; }
#endif
fn channel(i: u32, c: u32) -> u32 { return (row + i) * (2u * key_width() + p.heads * p.values) + c; }
fn key_head() -> u32 { return head % p.heads / (p.heads / p.key_heads); }
// The share of token j's contribution to the state that is left at token i; 0 unless j <= i in one document.
fn decay(i: u32, j: u32) -> f32 {
  let counts = j <= i && i < count && f32(j) >= start[i];
  let between = sums[i] - sums[j] + (rests[i] - rests[j]);
  return select(0.0, exp(select(0.0, between, counts)), counts);
}
#endpart

#part loads
// Part of the kernels that read `qkv`. Loads do not wait for a comparison: an element out of range is loaded from a
// valid place and replaced by 0. q_unit and k_unit are 0 beyond the last token.
fn query(i: u32, d: u32) -> f32 {
  let x = f32(qkv[channel(min(i, count - 1u), first_query() + key_head() * p.keys + min(d, p.keys - 1u))]);
  return select(0.0, x * q_unit[i], d < p.keys);
}
fn key(i: u32, d: u32) -> f32 {
  let x = f32(qkv[channel(min(i, count - 1u), first_key() + key_head() * p.keys + min(d, p.keys - 1u))]);
  return select(0.0, x * k_unit[i], d < p.keys);
}
fn value(i: u32, c: u32) -> f32 {
  let x = f32(qkv[channel(min(i, count - 1u), first_value() + head % p.heads * p.values + min(c, p.values - 1u))]);
  return select(0.0, x, i < count);
}
#endpart

#part gates
// Part of the kernels that read `info`: the chunk's gates, in workgroup memory. inside: the share of the incoming state
// that is left at each token. to_end: the share of each token that is left at the chunk's end.
var<workgroup> inside: array<f32, CHUNK>;
var<workgroup> to_end: array<f32, CHUNK>;
fn load_gates(lid: u32) {
  workgroupBarrier();
  if (lid < CHUNK) {
    sums[lid] = info[plane(0u, lid)];
    beta[lid] = info[plane(1u, lid)];
    q_unit[lid] = info[plane(2u, lid)];
    k_unit[lid] = info[plane(3u, lid)];
    start[lid] = info[plane(4u, lid)];
    rests[lid] = info[plane(5u, lid)];
  }
  workgroupBarrier();
  if (lid < CHUNK) {
    inside[lid] = select(0.0, exp(sums[lid] + rests[lid]), start[lid] < 0.0);
    to_end[lid] = decay(count - 1u, lid);
  }
  workgroupBarrier();
}
#endpart

#part read_gates
// Part of the kernels that make the system: a chunk's gates, and sums of g from each document's first token.
  if (lid < CHUNK) {
    let there = lid < count;
    let at = row + min(lid, count - 1u);
    let gate = at * p.heads + head % p.heads;
    // g as a multiple of 2^-11, whose sums are exact, and the remainder. exp(g) is 0 below -128.
    let here = max(select(0.0, g[gate], there), -128.0);
    sums[lid] = round(here * 2048.0) / 2048.0;
    rests[lid] = here - sums[lid];
    beta[lid] = select(0.0, beta_of[gate], there);
    // Relative to the chunk's first token.
    let first = doc_start[at] - cache_len[0] - i32(p.at + chunk * CHUNK);
    start[lid] = f32(clamp(first, -1, i32(CHUNK)));
  }
  workgroupBarrier();
  var sum = 0.0;
  var rest = 0.0;
  if (lid < CHUNK) {
#endpart

#part write_gates
#if CORRECTED
    q_unit[lid] = select(0.0, inverseSqrt(length.x + EPS) * p.scale, lid < count);
    k_unit[lid] = select(0.0, inverseSqrt(length.y + EPS), lid < count);
#else
    q_unit[lid] = select(0.0, 1.0, lid < count);
    k_unit[lid] = q_unit[lid];
#endif
    for (var j = u32(max(start[lid], 0.0)); j <= lid; j++) {
      sum += sums[j];
      rest += rests[j];
    }
  }
  workgroupBarrier();
  if (lid < CHUNK) {
    sums[lid] = sum;
    rests[lid] = rest;
    info[plane(0u, lid)] = sum;
    info[plane(1u, lid)] = beta[lid];
    info[plane(2u, lid)] = q_unit[lid];
    info[plane(3u, lid)] = k_unit[lid];
    info[plane(4u, lid)] = start[lid];
    info[plane(5u, lid)] = rest;
  }
  workgroupBarrier();
#endpart

#part diagonal_blocks of
// Part of the kernels that make the system: the 16 x 16 blocks on the inverse's diagonal. An invocation computes a
// column in registers. $of(i, j): the system.
  if (lid < CHUNK) {
    let block = lid / 16u * 16u;
#unroll t 16
    var made_$t = 0.0;
#end
#unroll t 16
    {
      var before = 0.0;
#unroll n 16
      if ($nu < $tu) { before += $of(block + $tu, block + $nu) * made_$n; }
#end
      made_$t = select(-beta[block + $tu] * before, select(0.0, 1.0, lid % 16u == $tu), $tu <= lid % 16u);
    }
#end
#unroll t 16
    mats[square(INVERSE, block + $tu, lid)] = made_$t;
#end
  }
#endpart

#part blocks_below
// Part of the kernels that make the system: the blocks of the inverse below the diagonal, nearest first. All loads come
// before their use, so that none waits for another.
  for (var away = 1u; away < 4u; away++) {
    storageBarrier();
    workgroupBarrier();
    for (var e = lid; e < 256u * (4u - away); e += THREADS) {
      let c = e / 256u * 16u + e % 16u;
      let to = (e / 256u + away) * 16u + e / 16u % 16u;
      var before = 0.0;
      for (var n = e / 256u * 16u; n < (e / 256u + away) * 16u; n += 16u) {
#unroll k 16
        let system_$k = mats[square(SYSTEM, to, n + $ku)];
        let inverse_$k = mats[square(INVERSE, n + $ku, c)];
#end
#unroll k 16
        before += system_$k * inverse_$k;
#end
      }
      between[e] = beta[to] * before;
    }
    workgroupBarrier();
    for (var e = lid; e < 256u * (4u - away); e += THREADS) {
      let c = e / 256u * 16u + e % 16u;
      let first = (e / 256u + away) * 16u;
      let to = first + e / 16u % 16u;
      var sum = 0.0;
#unroll k 16
      let own_$k = mats[square(INVERSE, to, first + $ku)];
#end
#unroll k 16
      sum += own_$k * between[e / 256u * 256u + $ku * 16u + e % 16u];
#end
      mats[square(INVERSE, to, c)] = -sum;
    }
  }
#endpart

#part staged
// Part of the kernels with matmuls: operands in workgroup memory, DEEP of the inner dimension at a time. A workgroup
// has SPLIT shares of COLUMNS / 4 x 16 invocations, each with 4 x 4 elements of a tile of 64 rows; a share takes 16 of
// DEEP.
const ACROSS = COLUMNS / 4u;
const PLACES = ACROSS * 16u;
const THREADS = PLACES * SPLIT;
const DEEP = 16u * SPLIT;
var<workgroup> left: array<vec4<f32>, LEFT>;
var<workgroup> right: array<vec4<f32>, THREADS>;

// An invocation's four rows of a tile.
struct Tile { r0: vec4<f32>, r1: vec4<f32>, r2: vec4<f32>, r3: vec4<f32> }
fn zeros() -> Tile { return Tile(vec4<f32>(0.0), vec4<f32>(0.0), vec4<f32>(0.0), vec4<f32>(0.0)); }
#endpart

#part begin
// Part of the kernels with matmuls: the invocation's place in the tile, first row i and first column j.
  let group = p.first + wg.x + wg.y * nwg.x;
  if (group >= p.end) { return; }
  let tx = lid % ACROSS;
  let ty = lid / ACROSS % 16u;
  let share = lid / PLACES;
  let i = 4u * ty;
  let j = 4u * tx;
#endpart

#part folded
// Part of the kernels whose workgroups have several shares: row n of the tile, after `fold` has stored all shares.
fn folded(n: u32, lid: u32) -> vec4<f32> {
  var sum = left[n * PLACES + lid % PLACES];
  for (var s = 1u; s < SPLIT; s++) { sum += left[(4u * s + n) * PLACES + lid % PLACES]; }
  return sum;
}
#endpart

#part fold
    workgroupBarrier();
#unroll n 4
    left[(4u * share + $nu) * PLACES + lid % PLACES] = tile.r$n;
#end
    workgroupBarrier();
#endpart

#part add4 lhs rhs inner
  // `add` for vec4 operands: $lhs(row / 4, n) has four rows, $rhs(n, column / 4) four columns.
  for (var n = 0u; n < $inner; n += DEEP) {
    workgroupBarrier();
    for (var e = lid; e < 16u * DEEP; e += THREADS) { left[e / 16u * 17u + e % 16u] = $lhs(e % 16u, n + e / 16u); }
    for (var e = lid; e < DEEP * ACROSS; e += THREADS) { right[e] = $rhs(n + e / ACROSS, e % ACROSS); }
    workgroupBarrier();
#include multiply
  }
#endpart

#part multiply
    for (var k = 16u * share; k < 16u * share + 16u; k++) {
      let l = left[k * 17u + ty];
      let r = right[k * ACROSS + tx];
      tile.r0 += l.x * r;
      tile.r1 += l.y * r;
      tile.r2 += l.z * r;
      tile.r3 += l.w * r;
    }
#endpart

#part add lhs rhs inner lk lr rk rc
  // tile += $lhs(row, n) $rhs(n, column), n < $inner. $lk and $lr are n and row / 4 of the e-th load, $rk and $rc its n
  // and column / 4, chosen so that neighboring invocations read neighboring elements.
  for (var n = 0u; n < $inner; n += DEEP) {
    workgroupBarrier();
    for (var e = lid; e < 16u * DEEP; e += THREADS) {
      let k = n + $lk;
      let r = 4u * ($lr);
      left[($lk) * 17u + ($lr)] = vec4<f32>($lhs(r, k), $lhs(r + 1u, k), $lhs(r + 2u, k), $lhs(r + 3u, k));
    }
    for (var e = lid; e < DEEP * ACROSS; e += THREADS) {
      let k = n + $rk;
      let c = 4u * ($rc);
      right[($rk) * ACROSS + ($rc)] = vec4<f32>($rhs(k, c), $rhs(k, c + 1u), $rhs(k, c + 2u), $rhs(k, c + 3u));
    }
    workgroupBarrier();
#include multiply
  }
#endpart

#part each_token
// Part of the kernels with a workgroup per token of a sequence: b, i and the chunk.
  let group = p.first + wg.x + wg.y * nwg.x;
  if (group >= p.end) { return; }
  let here = min(p.chunks * CHUNK, p.tokens - p.at);
  let b = group / here;
  let i = group % here % CHUNK;
  choose(b * p.heads, group % here / CHUNK);
#endpart

#part each_column
// Part of the kernels with a workgroup per 64 columns of a state: the invocation's column, and the rows of its share.
  let group = p.first + wg.x + wg.y * nwg.x;
  if (group >= p.end) { return; }
  choose(group / p.tiles, 0u);
  let c = group % p.tiles * 64u + lid % 64u;
  let there = c < p.values;
  let column = min(c, p.values - 1u);
  let share = (p.keys + 3u) / 4u;
  let first = lid / 64u * share;
  let last = min(first + share, p.keys);
#endpart
