// Parts of the attention kernels.

#part common
// Part of every attention kernel: base-2 exponents, the soft-cap, and the mask.
const LOG2E: f32 = 1.4426950408889634;

#if SOFTCAP
#include "common.inc.wgsl" softcap of=scores T=vec4<f32>

// The soft-cap of scores, which are base-2 exponents here.
const CAP: f32 = SOFTCAP * LOG2E;
fn capped(s: vec4<f32>) -> vec4<f32> { return CAP * tanh_of_scores(s / CAP); }
fn cap_slope(y: vec4<f32>) -> vec4<f32> { return 1.0 - (y / CAP) * (y / CAP); }  // the derivative of y = capped(s)
#endif

#include seen
#endpart

#part seen
// The first key that the query at `position` sees, in a document that begins at `start`.
fn first_seen(start: i32, position: u32) -> u32 {
  if (p.window == 0u) { return u32(start); }
  return max(u32(start), position + 1u - min(p.window, position + 1u));
}
#endpart

#part load x
// Part of the attention kernels: columns 4c .. 4c + 3 of a row of $x, zero beyond its WIDTH elements.
#if VEC
fn load_$x(row: u32, c: u32) -> vec4<f32> {
  if (c < W4) { return vec4<f32>($x[row * W4 + c]); }
  return vec4<f32>(0.0);
}
#else
fn load_$x(row: u32, c: u32) -> vec4<f32> {
  let columns = vec4<u32>(4u * c) + vec4<u32>(0u, 1u, 2u, 3u);
  let at = row * WIDTH + min(columns, vec4<u32>(WIDTH - 1u));
  let x = vec4<f32>(f32($x[at.x]), f32($x[at.y]), f32($x[at.z]), f32($x[at.w]));
  return select(vec4<f32>(0.0), x, columns < vec4<u32>(WIDTH));
}
#endif
#endpart

#part store y type
// Part of the attention kernels: columns 4c .. 4c + 3 of a row of $y, as far as it has WIDTH elements.
#if VEC
fn store_$y(row: u32, c: u32, value: vec4<f32>) { if (c < W4) { $y[row * W4 + c] = $type(value); } }
#else
fn store_$y(row: u32, c: u32, value: vec4<f32>) {
  for (var e = 0u; e < min(4u, WIDTH - min(4u * c, WIDTH)); e++) { $y[row * WIDTH + 4u * c + e] = $type(value[e]); }
}
#endif
#endpart

#part forward
// Part of attention.wgsl and attention_decode.wgsl: parameters, arrays, and how their rows are read and written.
struct Params {
  batch: u32, queries: u32, keys: u32, heads: u32,
  kv_heads: u32, query_tiles: u32, splits: u32, window: u32,
  scale: f32, first: u32, end: u32,  // workgroups of this dispatch
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> q: array<Q_T>;
@group(0) @binding(2) var<storage, read> k: array<K_T>;
@group(0) @binding(3) var<storage, read> v: array<V_T>;
@group(0) @binding(4) var<storage, read> doc_start: array<i32>;
@group(0) @binding(5) var<storage, read> cache_len: array<i32>;
@group(0) @binding(6) var<storage, read_write> o: array<O_T>;
@group(0) @binding(7) var<storage, read_write> lse: array<f32>;

const MASKED: f32 = -1e30;
const FLOOR: f32 = -1e20;  // least row maximum: exp2(MASKED - FLOOR) is 0, also in a row that sees no key of a tile
const LN2: f32 = 0.6931471805599453;

#include common
#include load x=q
#include load x=k
#include load x=v
#include store y=o type=O_T
#endpart

#part tiles_seen
// Part of attention_decode.wgsl and attention_combine.wgsl: which tiles of KEYS keys a sequence's queries see, and how
// many of the splits have one (at least 1).
const KEYS: u32 = 64u;

#if PAGED
fn start_of(b: u32, t: u32) -> i32 { return 0; }
fn first_position_of(b: u32) -> u32 { return u32(cache_len[b]); }
#else
fn start_of(b: u32, t: u32) -> i32 { return doc_start[b * p.queries + t]; }
fn first_position_of(b: u32) -> u32 { return u32(cache_len[0]); }
#endif
fn end_key_of(b: u32) -> u32 { return min(first_position_of(b) + p.queries, p.keys); }
fn first_tile_of(b: u32) -> u32 { return first_seen(start_of(b, 0u), first_position_of(b)) / KEYS; }
fn splits_seen(b: u32) -> u32 {
  let end = (end_key_of(b) + KEYS - 1u) / KEYS;
  return clamp(end - min(first_tile_of(b), end), 1u, p.splits);
}
#endpart

#part backward_bindings
// Part of the attention backward kernels: inputs.
@group(0) @binding(1) var<storage, read> dy: array<DO_T>;
@group(0) @binding(2) var<storage, read> q: array<Q_T>;
@group(0) @binding(3) var<storage, read> k: array<K_T>;
@group(0) @binding(4) var<storage, read> v: array<V_T>;
@group(0) @binding(5) var<storage, read> stats: array<vec2<f32>>;
@group(0) @binding(6) var<storage, read> doc_start: array<i32>;

#include common
#endpart

#part dkv_bindings
// Part of attention_backward_dkv.wgsl and attention_matrix_dkv.wgsl: parameters and arrays.
struct Params {
  batch: u32, queries: u32, heads: u32, kv_heads: u32,
  key_tiles: u32, head_splits: u32, query_splits: u32, window: u32,
  batch_first: u32, batch_count: u32, kv_first: u32, kv_count: u32,  // of this launch
  scale: f32, first: u32, end: u32,  // workgroups of this dispatch
}
@group(0) @binding(0) var<uniform> p: Params;
#include backward_bindings
@group(0) @binding(7) var<storage, read_write> dk: array<DK_T>;
@group(0) @binding(8) var<storage, read_write> dv: array<DV_T>;

const NEVER: u32 = 0xffffffffu;  // the first key seen by a query beyond the last
#endpart

#part dq_bindings
// Part of attention_backward_dq.wgsl and attention_matrix_dq.wgsl: parameters and arrays.
struct Params {
  batch: u32, queries: u32, heads: u32, kv_heads: u32,
  query_tiles: u32, splits: u32, window: u32, scale: f32,
  first: u32, end: u32,  // workgroups of this dispatch
}
@group(0) @binding(0) var<uniform> p: Params;
#include backward_bindings
@group(0) @binding(7) var<storage, read_write> dq: array<DQ_T>;
#endpart

#part tiles
// Part of the tiled attention kernels: a tile of scores, the left operand of the second matmul, and VN whole rows, its
// right operand.
const THREADS: u32 = TX * TY;

// One vec4 of padding per row puts neighboring rows into different banks.
struct ScoreRow { at: array<array<vec4<f32>, VN4>, NV>, pad: vec4<f32> }
var<workgroup> p_tile: array<array<ScoreRow, TY>, RM>;
var<workgroup> row_tile: array<array<array<vec4<f32>, TX>, RD>, VN>;

fn put_rows(x: array<vec4<f32>, LOADS_FLAT>, lid: u32) {
#unroll n LOADS_FLAT
  {
    let at = lid + $nu * THREADS;
    let row = at / (RD * TX);
    let c = at % (RD * TX);
    if (at < VN * RD * TX) { row_tile[row][c / TX][c % TX] = x[$n]; }
  }
#end
}
#endpart

#part backward
// Part of attention_backward_dq.wgsl and attention_backward_dkv.wgsl: loads.
#include load x=q
#include load x=dy
#include load x=k
#include load x=v
#include tiles
#endpart

#part fetch_rows x tokens heads
// Part of the tiled attention kernels: load this invocation's share of VN whole rows of $x, from `first` on, of one
// head. Rows from `end` on are not read: a cache may hold NaN beyond its last token, and 0 times NaN is not 0.
fn fetch_$x_rows(b: u32, head: u32, first: u32, end: u32, lid: u32) -> array<vec4<f32>, LOADS_FLAT> {
  var x: array<vec4<f32>, LOADS_FLAT>;
#unroll n LOADS_FLAT
  {
    let at = lid + $nu * THREADS;
    let row = at / (RD * TX);
    let c = at % (RD * TX);
    x[$n] = vec4<f32>(0.0);
    if (at < VN * RD * TX && first + row < end) {
      x[$n] = load_$x((b * p.$tokens + first + row) * p.$heads + head, c);
    }
  }
#end
  return x;
}
#endpart

#part pair Pair pair x y heads loads count place
// Part of the backward kernels: fetch and put move one chunk (4 DC4 columns) of $count rows of $x and $y, from `first`
// on, of one head, from the arrays to $x_tile and $y_tile. Each invocation moves its share.
struct $Pair { $x: array<vec4<f32>, $loads>, $y: array<vec4<f32>, $loads> }

fn fetch_$pair(chunk: u32, b: u32, head: u32, first: u32, lid: u32) -> $Pair {
  var both: $Pair;
#unroll n $loads
  {
    let at = lid + $nu * THREADS;
    let t = first + at / DC4;
    let row = (b * p.queries + t) * p.$heads + head;
    both.$x[$n] = vec4<f32>(0.0);
    both.$y[$n] = vec4<f32>(0.0);
    if (at < $count * DC4 && t < p.queries) {
      both.$x[$n] = load_$x(row, chunk * DC4 + at % DC4);
      both.$y[$n] = load_$y(row, chunk * DC4 + at % DC4);
    }
  }
#end
  return both;
}

fn put_$pair(both: $Pair, lid: u32) {
#unroll n $loads
  {
    let at = lid + $nu * THREADS;
    let row = at / DC4;
    if (at < $count * DC4) {
      $x_tile$place[at % DC4] = both.$x[$n];
      $y_tile$place[at % DC4] = both.$y[$n];
    }
  }
#end
}
#endpart

#part query_id
// Part of the attention kernels that own queries: split of the keys, head, batch element and first query of workgroup
// `id`.
  let split = id % p.splits;
  id /= p.splits;
  let h = id % p.heads;
  id /= p.heads;
  let b = id % p.batch;
  let t0 = (p.query_tiles - 1u - id / p.batch) * BM;
  let kv_head = h / (p.heads / p.kv_heads);
#endpart

#part query_tile
// Part of attention.wgsl and attention_backward_dq.wgsl: the workgroup's queries, and the invocation's place.
  var id = p.first + wg.x + wg.y * nwg.x;
  if (id >= p.end) { return; }
#include query_id
  let tx = lid % TX;
  let ty = lid / TX;
#endpart

#part key_id
// Part of the attention kernels that own keys: part of the head group and of the query tiles, key/value head, batch
// element and first key of workgroup `id`. end_query: queries from there on do not see the keys because of the window.
  let split = id % parts;
  id /= parts;
  let kv_head = p.kv_first + id % p.kv_count;
  id /= p.kv_count;
  let b = p.batch_first + id % p.batch_count;
  let j0 = (id / p.batch_count) * BM;
  let j_last = min(j0 + BM, p.queries) - 1u;
  let query_split = split % p.query_splits;
  let group = p.heads / p.kv_heads / p.head_splits;  // heads of this part
  let first_head = kv_head * (p.heads / p.kv_heads) + split / p.query_splits * group;
  var end_query = p.queries;
  if (p.window > 0u) { end_query = min(end_query, j_last + p.window); }
#endpart

#part dot sum left right
// Part of the tiled attention kernels: $sum += $left . $right, for vec4 $c of D and vec4 $g of the score columns.
      {
        let b0 = $right[4u * $gu][tx][$c];
        let b1 = $right[4u * $gu + 1u][tx][$c];
        let b2 = $right[4u * $gu + 2u][tx][$c];
        let b3 = $right[4u * $gu + 3u][tx][$c];
        let bx = vec4<f32>(b0.x, b1.x, b2.x, b3.x);
        let by = vec4<f32>(b0.y, b1.y, b2.y, b3.y);
        let bz = vec4<f32>(b0.z, b1.z, b2.z, b3.z);
        let bw = vec4<f32>(b0.w, b1.w, b2.w, b3.w);
#unroll i RM
        {
          let a = $left[$c];
          $sum[$iu * RN4 + $gu] = fma(vec4<f32>(a.w), bw, fma(vec4<f32>(a.z), bz,
            fma(vec4<f32>(a.y), by, fma(vec4<f32>(a.x), bx, $sum[$iu * RN4 + $gu]))));
        }
#end
      }
#endpart

#part accumulate sum
// Part of the tiled attention kernels: $sum += scores of p_tile times rows of row_tile, of piece `part`.
#unroll n VN4
#unroll r RD
      {
        let b0 = row_tile[4u * $nu][$r][tx];
        let b1 = row_tile[4u * $nu + 1u][$r][tx];
        let b2 = row_tile[4u * $nu + 2u][$r][tx];
        let b3 = row_tile[4u * $nu + 3u][$r][tx];
#unroll i RM
        {
          let a = p_tile[$i][ty].at[part][$n];
          $sum[$iu * RD + $ru] = fma(vec4<f32>(a.w), b3, fma(vec4<f32>(a.z), b2,
            fma(vec4<f32>(a.y), b1, fma(vec4<f32>(a.x), b0, $sum[$iu * RD + $ru]))));
        }
#end
      }
#end
#end
#endpart
