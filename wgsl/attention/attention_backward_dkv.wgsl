// dv[j] = sum_t p[t, j] do[t],  dk[j] = scale sum_t ds[t, j] q[t], over the queries t that see key j, of all heads of
// the group; p, ds and delta as in attention_backward_dq.wgsl.
//
//   do q [B, T, H, D], k v [B, T, G, D] float32 or float16; doc_start [B, T] i32
//   stats [B, H, T] vec2 f32: lse log2(e), delta (attention_delta.wgsl)
//   dk dv [B, T, G, D] (DK_T, DV_T), overwritten; with head_splits * query_splits > 1
//   f32 [head_splits * query_splits, B, T, G, D], for attention_reduce.wgsl.
//
// Dispatch: head_splits * query_splits * G * B * ceil(T / BM) workgroups (folded), the tiles with the most queries
// first. A workgroup owns BM keys of one key/value head and walks the heads of its part of the group and the tiles of
// BN queries that see them. Tiles are transposed relative to attention_backward_dq.wgsl: rows are keys, columns are
// queries. p and then ds pass through p_tile.
//
// Dao, FlashAttention-2 (arXiv:2307.08691), algorithm 2.
#include "attention.inc.wgsl" dkv_bindings
#include "attention.inc.wgsl" backward
#include "attention.inc.wgsl" store y=dk type=DK_T
#include "attention.inc.wgsl" store y=dv type=DV_T

var<workgroup> k_tile: array<array<array<vec4<f32>, DC4_PADDED>, TY>, RM>;
var<workgroup> v_tile: array<array<array<vec4<f32>, DC4_PADDED>, TY>, RM>;
var<workgroup> q_tile: array<array<array<vec4<f32>, DC4_PADDED>, TX>, RN>;  // query 4 (tx + TX g) + e at [4 g + e][tx]
var<workgroup> dy_tile: array<array<array<vec4<f32>, DC4_PADDED>, TX>, RN>;
// Of the queries 4c .. 4c + 3 of a tile: first key seen, lse log2(e), delta.
var<workgroup> low_tile: array<vec4<u32>, BN4>;
var<workgroup> lse_tile: array<vec4<f32>, BN4>;
var<workgroup> delta_tile: array<vec4<f32>, BN4>;

#include "attention.inc.wgsl" pair Pair=Keys pair=keys x=k y=v heads=kv_heads loads=LOADS_ROWS count=BM place=[row/TY][row%TY]
#include "attention.inc.wgsl" pair Pair=Queries pair=queries x=q y=dy heads=heads loads=LOADS_COLUMNS count=BN place=[row/(4u*TX)*4u+row%4u][row/4u%TX]
#include "attention.inc.wgsl" fetch_rows x=dy tokens=queries heads=heads
#include "attention.inc.wgsl" fetch_rows x=q tokens=queries heads=heads

fn fill_stats(b: u32, h: u32, t0: u32, lid: u32) {
  for (var c = lid; c < BN4; c += THREADS) {
    var low = vec4<u32>(NEVER);
    var lse = vec4<f32>(0.0);
    var delta = vec4<f32>(0.0);
    for (var e = 0u; e < 4u; e++) {
      let t = t0 + 4u * c + e;
      if (t < p.queries) {
        low[e] = first_seen(doc_start[b * p.queries + t], t);
        let stat = stats[(b * p.heads + h) * p.queries + t];
        lse[e] = stat.x;
        delta[e] = stat.y;
      }
    }
    low_tile[c] = low;
    lse_tile[c] = lse;
    delta_tile[c] = delta;
  }
}

@compute @workgroup_size(TX * TY)
fn main(
  @builtin(workgroup_id) wg: vec3<u32>,
  @builtin(num_workgroups) nwg: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
  var id = p.first + wg.x + wg.y * nwg.x;
  if (id >= p.end) { return; }
  let parts = p.head_splits * p.query_splits;
#include "attention.inc.wgsl" key_id
  let tx = lid % TX;
  let ty = lid / TX;

  var acc_k: array<vec4<f32>, ACC>;
  var acc_v: array<vec4<f32>, ACC>;
#unroll n ACC
  acc_k[$n] = vec4<f32>(0.0);
  acc_v[$n] = vec4<f32>(0.0);
#end

  for (var h = first_head; h < first_head + group; h++) {
    for (var tile = j0 / BN + query_split; tile * BN < end_query; tile += p.query_splits) {
      let t0 = tile * BN;
      // Document starts rise along a sequence: if the first query's document begins after these keys, so do all later.
      if (u32(doc_start[b * p.queries + t0]) > j_last) { break; }
      var s: array<vec4<f32>, SCORES>;
      var dp: array<vec4<f32>, SCORES>;
#unroll n SCORES
      s[$n] = vec4<f32>(0.0);
      dp[$n] = vec4<f32>(0.0);
#end
      for (var chunk = 0u; chunk < ND; chunk++) {
        workgroupBarrier();
        if (chunk == 0u) { fill_stats(b, h, t0, lid); }
        let keys = fetch_keys(chunk, b, kv_head, j0, lid);
        let queries = fetch_queries(chunk, b, h, t0, lid);
        put_keys(keys, lid);
        put_queries(queries, lid);
        workgroupBarrier();
#unroll c DC4
#unroll g RN4
#include "attention.inc.wgsl" dot sum=s left=k_tile[$i][ty] right=q_tile
#include "attention.inc.wgsl" dot sum=dp left=v_tile[$i][ty] right=dy_tile
#end
#end
      }

#if SOFTCAP
#unroll n SCORES
      s[$n] = capped(s[$n] * (p.scale * LOG2E));
#end
#endif
      // s becomes p, which goes to workgroup memory for dv; dp becomes ds.
#unroll g RN4
      {
        let c = tx + TX * $gu;
        let lse = lse_tile[c];
        let delta = delta_tile[c];
        let low = low_tile[c];
        let t = vec4<u32>(t0 + 4u * c) + vec4<u32>(0u, 1u, 2u, 3u);
#unroll i RM
        {
          let key = vec4<u32>(j0 + $iu * TY + ty);
#if SOFTCAP
          let y = s[$iu * RN4 + $gu];
          let x = select(vec4<f32>(0.0), exp2(y - lse), (key >= low) & (key <= t));
          dp[$iu * RN4 + $gu] = x * (dp[$iu * RN4 + $gu] - delta) * cap_slope(y);
#else
          let x = select(
            vec4<f32>(0.0),
            exp2(fma(s[$iu * RN4 + $gu], vec4<f32>(p.scale * LOG2E), -lse)),
            (key >= low) & (key <= t),
          );
          dp[$iu * RN4 + $gu] = x * (dp[$iu * RN4 + $gu] - delta);
#endif
          p_tile[$i][ty].at[c / VN4][c % VN4] = x;
        }
#end
      }
#end
      for (var part = 0u; part < NV; part++) {
        if (part > 0u) { workgroupBarrier(); }
        put_rows(fetch_dy_rows(b, h, t0 + part * VN, p.queries, lid), lid);
        workgroupBarrier();
#include "attention.inc.wgsl" accumulate sum=acc_v
      }
      workgroupBarrier();
#unroll i RM
#unroll g RN4
      p_tile[$i][ty].at[(tx + TX * $gu) / VN4][(tx + TX * $gu) % VN4] = dp[$iu * RN4 + $gu];
#end
#end
      for (var part = 0u; part < NV; part++) {
        if (part > 0u) { workgroupBarrier(); }
        put_rows(fetch_q_rows(b, h, t0 + part * VN, p.queries, lid), lid);
        workgroupBarrier();
#include "attention.inc.wgsl" accumulate sum=acc_k
      }
    }
  }

#unroll i RM
  {
    let j = j0 + $iu * TY + ty;
    if (j < p.queries) {
#unroll r RD
      {
        let row = ((split * p.batch + b) * p.queries + j) * p.kv_heads + kv_head;
        store_dk(row, tx + TX * $ru, acc_k[$iu * RD + $ru] * p.scale);
        store_dv(row, tx + TX * $ru, acc_v[$iu * RD + $ru]);
      }
#end
    }
  }
#end
}
