// attention_backward_dkv.wgsl on tensor cores: dk and dv, with f16 q, k, v, do and f32 sums. Heads have WIDTH elements,
// a multiple of 32.
//
// Operands, masks and dispatch are those of attention_backward_dkv.wgsl. A workgroup owns BM keys of one key/value head
// and walks the heads of its part of the group and the tiles of BN queries that see them; rows are keys, columns are
// queries. Two subgroups share BLOCKS x 16 keys. One holds the keys and computes the scores, then dv; the other holds
// the values and computes dp, then dk. So each has one left operand and one sum in registers, and what it reads of a
// tile of q or do serves all of its rows. p and ds are rounded to f16 for the matmuls with do and q; dk is scaled at
// the end. STORED: ds is stored as well, for attention_matrix_dq_stored.wgsl.
// Dao, FlashAttention-2 (arXiv:2307.08691), algorithm 2. Needs subgroups of LANES.
enable f16;
enable wgpu_cooperative_matrix;

#include "attention.inc.wgsl" dkv_bindings
#if STORED
@group(0) @binding(9) var<storage, read_write> ds: array<vec4<f16>>;
#endif
#include "common.inc.wgsl" eight

const THREADS: u32 = $LANESu * SG;
const BM: u32 = 8u * SG * BLOCKS;
const W8: u32 = WIDTH / 8u;
// Row lengths in eights and in vec4, padded so that neighboring rows start in different banks. Scores gain nothing by it.
const TILE_LD: u32 = W8 + 1u;
const LEFT_W8: u32 = W8 / LEFT_PARTS;
const LEFT_LD: u32 = LEFT_W8 + 1u;
const BN4: u32 = BN / 4u;
const S_LD: u32 = BN4;
const P_LD: u32 = BN4 + 2u;

// First the left operands pass through it; then it has BN rows of q and BN of do.
var<workgroup> tile: array<Eight, TILE>;
// Scores of the workgroup's keys, and behind them dp. Elements of cooperative matrices, which invocations cannot index.
var<workgroup> strips: array<vec4<f32>, 2u * BM * S_LD>;
var<workgroup> lefts: array<vec4<f16>, 2u * BM * P_LD>;  // p, and behind it ds
// Of each query of the tile: first key seen, lse log2(e), delta.
var<workgroup> low_tile: array<u32, BN>;
var<workgroup> stat_tile: array<vec2<f32>, BN>;

struct Query { low: u32, stat: vec2<f32> }

fn of_query(b: u32, h: u32, t: u32) -> Query {
  let inside = min(t, p.queries - 1u);
  let low = select(NEVER, first_seen(doc_start[b * p.queries + inside], inside), t < p.queries);
  return Query(low, stats[(b * p.heads + h) * p.queries + inside]);
}

fn keep(query: Query, lid: u32) {
  if (lid < BN) {
    low_tile[lid] = query.low;
    stat_tile[lid] = query.stat;
  }
}

@compute @workgroup_size(THREADS)
fn main(
#include "attention_matrix.inc.wgsl" builtins
) {
  var id = p.first + wg.x + wg.y * nwg.x;
  let parts = p.head_splits * p.query_splits;
  let last_id = p.end - 1u;
  let extra = id > last_id;
  id = min(id, last_id);
#include "attention.inc.wgsl" key_id
#include "common.inc.wgsl" subgroup_index
  let side = subgroup % 2u;
  let first_row = subgroup / 2u * (16u * BLOCKS);
  let mine = side * BM + first_row;  // of the strips and the left operands

  // Tiles of the queries that see a key of the tile: from the diagonal to the end of the window or the document.
  // Document starts rise along a sequence, so a binary search finds the first query whose document begins after these
  // keys.
  var next_query = j0;
  var to_query = end_query;
  while (next_query < to_query) {
    let middle = (next_query + to_query) / 2u;
    if (u32(doc_start[b * p.queries + middle]) > j_last) { to_query = middle; } else { next_query = middle + 1u; }
  }
  end_query = next_query;
  let first_tile = j0 / BN + query_split;
  let tiles = (max((end_query + BN - 1u) / BN, first_tile) - first_tile + p.query_splits - 1u) / p.query_splits;

  let ld = 2u * TILE_LD;  // row stride for cooperative loads, in vec4<f16>
  let ld_left = 2u * LEFT_LD;
  let ld_s = S_LD;
  let ld_p = P_LD;
#unroll part LEFT_PARTS
#unroll n LOADS_ROWS
  {
    let at = (lid + $nu * THREADS) % (BM * LEFT_W8);  // some may be read twice
    let source = ((b * p.queries + min(j0 + at / LEFT_W8, p.queries - 1u)) * p.kv_heads + kv_head) * W8 + LEFT_W8 * $partu + at % LEFT_W8;
    let k_words = k[source];
    let v_words = v[source];
    let k_to = at / LEFT_W8 * LEFT_LD + at % LEFT_W8;
    let v_to = k_to + BM * LEFT_LD;
    tile[k_to] = Eight(four_of(k_words.xy), four_of(k_words.zw));
    tile[v_to] = Eight(four_of(v_words.xy), four_of(v_words.zw));
  }
#end
  workgroupBarrier();
#unroll r BLOCKS
#unroll c LEFT_DF
  let x_at_$r_$part_$c = (mine + 16u * $ru) * LEFT_LD + 2u * $cu;
  let x_$r_$part_$c = coopLoadT<coop_mat16x16<f16, A>>(&tile[x_at_$r_$part_$c].low, ld_left);
#end
#end
  workgroupBarrier();
#end
#unroll r BLOCKS
#unroll g OUT_PARTS
#unroll j NF
  var acc_$r_$g_$j = coop_mat16x16<f32, C>();
#end
#end
#end
  let to_base2 = p.scale * LOG2E;
  let column = lid % BN4;  // of the invocation's elements, as vec4
  let row = lid / BN4;     // of the first ones

  let steps = tiles * group;
  {
    let h_next = first_head;
    let t_next = first_tile * BN;
#include "attention_matrix.inc.wgsl" fetch x=q y=dy first=t_next heads=heads head=h_next
    let query = of_query(b, h_next, t_next + lid % BN);
#include "attention_matrix.inc.wgsl" stage x=q place=0u
#include "attention_matrix.inc.wgsl" stage x=dy place=BN
    keep(query, lid);
  }
  // The head and the tile of this step, counted because divisions take 5 % of the time for heads of 64.
  var h = first_head;
  var number = 0u;
  for (var n = 0u; n < steps; n++) {
    let t0 = (first_tile + number * p.query_splits) * BN;
    workgroupBarrier();
#unroll r BLOCKS
#unroll j NF
    var s_$r_$j = coop_mat16x16<f32, C>();
#end
#end
#unroll part LEFT_PARTS
#unroll c LEFT_DF
#unroll j NF
    {
      let right_at_$j = (side * BN + 16u * $ju) * TILE_LD + LEFT_W8 * $partu + 2u * $cu;
      let right = coopLoad<coop_mat16x16<f16, B>>(&tile[right_at_$j].low, ld);
#unroll r BLOCKS
      s_$r_$j = coopMultiplyAdd(x_$r_$part_$c, right, s_$r_$j);
#end
    }
#end
#end
#end
#unroll r BLOCKS
#unroll j NF
    let s_at_$r_$j = (mine + 16u * $ru) * S_LD + 4u * $ju;
    coopStoreT(s_$r_$j, &strips[s_at_$r_$j], ld_s);
#end
#end
    workgroupBarrier();
    let wraps = number + 1u == tiles;
    let next_number = select(number + 1u, 0u, wraps);
    let h_next = min(h + u32(wraps), first_head + group - 1u);
    let t_next = (first_tile + next_number * p.query_splits) * BN;
#include "attention_matrix.inc.wgsl" fetch x=q y=dy first=t_next heads=heads head=h_next
    let query = of_query(b, h_next, t_next + lid % BN);
    {
      let c0 = stat_tile[4u * column];
      let c1 = stat_tile[4u * column + 1u];
      let c2 = stat_tile[4u * column + 2u];
      let c3 = stat_tile[4u * column + 3u];
      let lse2 = vec4<f32>(c0.x, c1.x, c2.x, c3.x);
      let delta = vec4<f32>(c0.y, c1.y, c2.y, c3.y);
      let masked = t0 < j_last || low_tile[BN - 1u] > j0;
#if STORED
      let block = t0 / 16u + column / 4u;
#include "attention_matrix.inc.wgsl" stored_at block=block to=stored
#endif
#unroll i VECTORS
      {
        let r = row + $iu * (THREADS / BN4);
        var e = exp2(strips[r * S_LD + column] * to_base2 - lse2);
        if (masked) {
          let j = vec4<u32>(j0 + r);
          let lows = vec4<u32>(low_tile[4u * column], low_tile[4u * column + 1u], low_tile[4u * column + 2u], low_tile[4u * column + 3u]);
          e = select(vec4<f32>(), e, (lows <= j) & (vec4<u32>(t0 + 4u * column) + vec4<u32>(0u, 1u, 2u, 3u) >= j));
        }
        let d = vec4<f16>(e * (strips[(BM + r) * S_LD + column] - delta));
        lefts[r * P_LD + column] = vec4<f16>(e);
        lefts[(BM + r) * P_LD + column] = d;
#if STORED
        if (!extra) { ds[(stored + j0 + r) * 4u + column % 4u] = d; }
#endif
      }
#end
    }
    workgroupBarrier();
#unroll j NF
    {
#unroll r BLOCKS
      let left_at_$r = (mine + 16u * $ru) * P_LD + 4u * $ju;
      let left_$r = coopLoadT<coop_mat16x16<f16, A>>(&lefts[left_at_$r], ld_p);
#end
#unroll g OUT_PARTS
#unroll i NF
      {
        let right_at_$i = ((1u - side) * BN + 16u * $ju) * TILE_LD + 2u * ($gu * NF + $iu);
        let right = coopLoadT<coop_mat16x16<f16, B>>(&tile[right_at_$i].low, ld);
#unroll r BLOCKS
        acc_$r_$g_$i = coopMultiplyAdd(left_$r, right, acc_$r_$g_$i);
#end
      }
#end
#end
    }
#end
    workgroupBarrier();
#include "attention_matrix.inc.wgsl" stage x=q place=0u
#include "attention_matrix.inc.wgsl" stage x=dy place=BN
    keep(query, lid);
    h = h_next;
    number = next_number;
  }

  // The sums are stored through the strips, BN columns at a time.
  let out = ((split * p.batch + b) * p.queries * p.kv_heads + kv_head) * W4 + column;
#unroll g OUT_PARTS
  workgroupBarrier();
#unroll r BLOCKS
#unroll j NF
  let out_at_$g_$r_$j = (mine + 16u * $ru) * S_LD + 4u * $ju;
  coopStoreT(acc_$r_$g_$j, &strips[out_at_$g_$r_$j], ld_s);
#end
#end
  workgroupBarrier();
#unroll i VECTORS
  {
    let r = row + $iu * (THREADS / BN4);
    let to = out + (j0 + r) * p.kv_heads * W4 + $gu * BN4;
    if (j0 + r < p.queries && !extra) {
      dv[to] = DV_T(strips[r * S_LD + column]);
      dk[to] = DK_T(strips[(BM + r) * S_LD + column] * p.scale);
    }
  }
#end
#end
}
