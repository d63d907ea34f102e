// attention_backward_dkv.wgsl on tensor cores: dk and dv, with f16 q, k, v, do and f32 sums. Heads have WIDTH elements,
// a multiple of 32.
//
// Operands, masks and dispatch are those of attention_backward_dkv.wgsl. A workgroup owns BM = 16 SG keys of one
// key/value head and walks the heads of its part of the group and the tiles of BN queries that see them; rows are keys,
// columns are queries. Two subgroups share 16 keys. Each computes half of the columns of the scores and half of the
// width of dk and dv, so that keys, values and both sums stay in registers. p and ds are rounded to f16 for the matmuls
// with do and q; dk is scaled at the end.
// Dao, FlashAttention-2 (arXiv:2307.08691), algorithm 2. Needs subgroups of LANES.
enable f16;
enable wgpu_cooperative_matrix;

#include "attention.inc.wgsl" dkv_bindings
#include "common.inc.wgsl" eight

const THREADS: u32 = $SG_LANESu * SG;
#include "attention_matrix.inc.wgsl" tiles

var<workgroup> dp_strips: array<vec4<f32>, BM * S_LD - 2u>;
var<workgroup> p_tile: array<vec4<f16>, BM * S_LD - 2u>;
var<workgroup> ds_tile: array<vec4<f16>, BM * S_LD - 2u>;
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
  let keys16 = subgroup / 2u;  // which 16 keys, and
  let side = subgroup % 2u;    // which half of the columns
#if LANES == 8
  let row = lid;  // one invocation has a whole row, whatever its side
  let quarter = 0u;
#else
  let row = keys16 * 16u + (lid % $LANESu) / $ROW_LANESu;
  let quarter = (side * $ROW_LANESu + lid % $ROW_LANESu) * (BN / $ROW_VECSu);  // of the row's columns, as vec4
#endif

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
  let ld_left = 2u * (LEFT_W8 + 1u);
  let ld_s = S_LD;
#include "attention_matrix.inc.wgsl" left x=k first=j0 heads=kv_heads head=kv_head row=keys16*16u blocks=1
#include "attention_matrix.inc.wgsl" left x=v first=j0 heads=kv_heads head=kv_head row=keys16*16u blocks=1
#unroll g OUT_PARTS
#unroll i HALF_NF
  var acc_k_$g_$i = coop_mat16x16<f32, C>();
  var acc_v_$g_$i = coop_mat16x16<f32, C>();
#end
#end
  let to_base2 = p.scale * LOG2E;
  let strip = keys16 * 16u * S_LD + side * (BN / 8u);

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
  for (var n = 0u; n < steps; n++) {
    let t0 = (first_tile + (n % tiles) * p.query_splits) * BN;
    workgroupBarrier();
    // q and dy alternate, so that no multiplication waits for the one before it.
#unroll j HALF_NF
    var s_$j = coop_mat16x16<f32, C>();
    var dp_$j = coop_mat16x16<f32, C>();
#end
#unroll part LEFT_PARTS
#unroll c LEFT_DF
#unroll j HALF_NF
    {
      let q_at_$j = (side * (BN / 2u) + 16u * $ju) * TILE_LD + LEFT_W8 * $partu + 2u * $cu;
      let q_b = coopLoad<coop_mat16x16<f16, B>>(&tile[q_at_$j].low, ld);
      let dy_at_$j = q_at_$j + BN * TILE_LD;
      let dy_b = coopLoad<coop_mat16x16<f16, B>>(&tile[dy_at_$j].low, ld);
      s_$j = coopMultiplyAdd(k_0_$part_$c, q_b, s_$j);
      dp_$j = coopMultiplyAdd(v_0_$part_$c, dy_b, dp_$j);
    }
#end
#end
#end
#unroll j HALF_NF
    let s_at_$j = strip + 4u * $ju;
    coopStoreT(s_$j, &strips[s_at_$j], ld_s);
    coopStoreT(dp_$j, &dp_strips[s_at_$j], ld_s);
#end
    workgroupBarrier();
#unroll i QUARTER
    {
      let at = quarter + $iu;
      let j = j0 + row;
      let t = t0 + 4u * at;
      let lse2 = vec4<f32>(stat_tile[4u * at].x, stat_tile[4u * at + 1u].x, stat_tile[4u * at + 2u].x, stat_tile[4u * at + 3u].x);
      let delta = vec4<f32>(stat_tile[4u * at].y, stat_tile[4u * at + 1u].y, stat_tile[4u * at + 2u].y, stat_tile[4u * at + 3u].y);
      let lows = vec4<u32>(low_tile[4u * at], low_tile[4u * at + 1u], low_tile[4u * at + 2u], low_tile[4u * at + 3u]);
      let seen = (lows <= vec4<u32>(j)) & (vec4<u32>(t) + vec4<u32>(0u, 1u, 2u, 3u) >= vec4<u32>(j));
      let e = select(vec4<f32>(), exp2(strips[row * S_LD + at] * to_base2 - lse2), seen);
      p_tile[row * S_LD + at] = vec4<f16>(e);
      ds_tile[row * S_LD + at] = vec4<f16>(e * (dp_strips[row * S_LD + at] - delta));
    }
#end
    let next = min(n + 1u, steps - 1u);
    let h_next = first_head + next / tiles;
    let t_next = (first_tile + (next % tiles) * p.query_splits) * BN;
#include "attention_matrix.inc.wgsl" fetch x=q y=dy first=t_next heads=heads head=h_next
    let query = of_query(b, h_next, t_next + lid % BN);
    workgroupBarrier();
#unroll j NF
    {
      let p_at = keys16 * 16u * S_LD + 4u * $ju;
      let p_a = coopLoadT<coop_mat16x16<f16, A>>(&p_tile[p_at], ld_s);
      let ds_a = coopLoadT<coop_mat16x16<f16, A>>(&ds_tile[p_at], ld_s);
#unroll g OUT_PARTS
#unroll i HALF_NF
      {
        let q_at_$i = (16u * $ju) * TILE_LD + side * (W8 / 2u) + 2u * ($gu * HALF_NF + $iu);
        let q_b = coopLoadT<coop_mat16x16<f16, B>>(&tile[q_at_$i].low, ld);
        let dy_at_$i = (BN + 16u * $ju) * TILE_LD + side * (W8 / 2u) + 2u * ($gu * HALF_NF + $iu);
        let dy_b = coopLoadT<coop_mat16x16<f16, B>>(&tile[dy_at_$i].low, ld);
        acc_k_$g_$i = coopMultiplyAdd(ds_a, q_b, acc_k_$g_$i);
        acc_v_$g_$i = coopMultiplyAdd(p_a, dy_b, acc_v_$g_$i);
      }
#end
#end
    }
#end
    workgroupBarrier();
#include "attention_matrix.inc.wgsl" stage x=q place=0u
#include "attention_matrix.inc.wgsl" stage x=dy place=BN
    keep(query, lid);
  }

  // The sums are stored through the strips, BN / 2 columns of each side at a time.
  let j = j0 + row;
  let stores = j < p.queries && !extra;
#if LANES == 8
  let out = (((split * p.batch + b) * p.queries + j) * p.kv_heads + kv_head) * W4;
#else
  let out = (((split * p.batch + b) * p.queries + j) * p.kv_heads + kv_head) * W4 + side * (W4 / 2u);
#endif
#unroll g OUT_PARTS
  workgroupBarrier();
#unroll i HALF_NF
  let out_at_$g_$i = strip + 4u * $iu;
  coopStoreT(acc_k_$g_$i, &strips[out_at_$g_$i], ld_s);
  coopStoreT(acc_v_$g_$i, &dp_strips[out_at_$g_$i], ld_s);
#end
  workgroupBarrier();
#unroll i QUARTER
  if (stores) {
    let at = quarter + $iu;
#if LANES == 8
    let column = out + at / (BN / 8u) * (W4 / 2u) + $gu * (BN / 8u) + at % (BN / 8u);
#else
    let column = out + $gu * (BN / 8u) + at - side * (BN / 8u);
#endif
    dk[column] = DK_T(strips[row * S_LD + at] * p.scale);
    dv[column] = DV_T(dp_strips[row * S_LD + at]);
  }
#end
#end
}
