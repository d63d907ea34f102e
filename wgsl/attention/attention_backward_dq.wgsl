// dq[t] = scale sum_j ds[t, j] k[j],  ds = p (dp - delta),  p = exp(scale q . k - lse),  dp[t, j] = do[t] . v[j],
// delta[t] = do[t] . o[t], over the keys j that query t sees (attention.wgsl, with cache_len = 0 and S = T).
//
//   do q [B, T, H, D], k v [B, T, G, D] float32 or float16; doc_start [B, T] i32
//   stats [B, H, T] vec2 f32: lse log2(e), delta (attention_delta.wgsl)
//   dq [B, T, H, D] (DQ_T), overwritten; with splits > 1 f32 [splits, B, T, H, D], for attention_reduce.wgsl.
//
// Dispatch: splits * H * B * ceil(T / BM) workgroups (folded), the tiles with the most keys first. Layout of tiles and
// registers as in attention.wgsl. Scores and dp are recomputed chunk by chunk of D, then k is read as rows.
//
// Dao, FlashAttention-2 (arXiv:2307.08691), algorithm 2, dq split off so that no atomics are needed.
#include "attention.inc.wgsl" dq_bindings
#include "attention.inc.wgsl" backward
#include "attention.inc.wgsl" store y=dq type=DQ_T

var<workgroup> q_tile: array<array<array<vec4<f32>, DC4_PADDED>, TY>, RM>;
var<workgroup> dy_tile: array<array<array<vec4<f32>, DC4_PADDED>, TY>, RM>;
var<workgroup> k_tile: array<array<array<vec4<f32>, DC4_PADDED>, TX>, RN>;  // key 4 (tx + TX g) + e at [4 g + e][tx]
var<workgroup> v_tile: array<array<array<vec4<f32>, DC4_PADDED>, TX>, RN>;

#include "attention.inc.wgsl" pair Pair=Queries pair=queries x=q y=dy heads=heads loads=LOADS_ROWS count=BM place=[row/TY][row%TY]
#include "attention.inc.wgsl" pair Pair=Keys pair=keys x=k y=v heads=kv_heads loads=LOADS_COLUMNS count=BN place=[row/(4u*TX)*4u+row%4u][row/4u%TX]
#include "attention.inc.wgsl" fetch_rows x=k tokens=queries heads=kv_heads

@compute @workgroup_size(TX * TY)
fn main(
  @builtin(workgroup_id) wg: vec3<u32>,
  @builtin(num_workgroups) nwg: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
#include "attention.inc.wgsl" query_tile

  // Keys that the tile sees: both bounds rise with t.
  let t_last = min(t0 + BM, p.queries) - 1u;
  let first_key = first_seen(doc_start[b * p.queries + t0], t0);
  let last_low = first_seen(doc_start[b * p.queries + t_last], t_last);

  var low: array<u32, RM>;
  var stat: array<vec2<f32>, RM>;
  var acc: array<vec4<f32>, ACC>;
#unroll i RM
  {
    let t = min(t0 + $iu * TY + ty, p.queries - 1u);
    low[$i] = first_seen(doc_start[b * p.queries + t], t);
    stat[$i] = stats[(b * p.heads + h) * p.queries + t];
  }
#end
#unroll n ACC
  acc[$n] = vec4<f32>(0.0);
#end

  for (var tile = first_key / BN + split; tile * BN <= t_last; tile += p.splits) {
    let j0 = tile * BN;
    var s: array<vec4<f32>, SCORES>;
    var dp: array<vec4<f32>, SCORES>;
#unroll n SCORES
    s[$n] = vec4<f32>(0.0);
    dp[$n] = vec4<f32>(0.0);
#end
    for (var chunk = 0u; chunk < ND; chunk++) {
      workgroupBarrier();
      let queries = fetch_queries(chunk, b, h, t0, lid);
      let keys = fetch_keys(chunk, b, kv_head, j0, lid);
      put_queries(queries, lid);
      put_keys(keys, lid);
      workgroupBarrier();
#unroll c DC4
#unroll g RN4
#include "attention.inc.wgsl" dot sum=s left=q_tile[$i][ty] right=k_tile
#include "attention.inc.wgsl" dot sum=dp left=dy_tile[$i][ty] right=v_tile
#end
#end
    }

    let masked = j0 + BN > t0 + 1u || j0 < last_low;
#unroll i RM
#unroll g RN4
    {
#if SOFTCAP
      let y = capped(s[$iu * RN4 + $gu] * (p.scale * LOG2E));
      let x = exp2(y - vec4<f32>(stat[$i].x));
      var ds = x * (dp[$iu * RN4 + $gu] - vec4<f32>(stat[$i].y)) * cap_slope(y);
#else
      let x = exp2(fma(s[$iu * RN4 + $gu], vec4<f32>(p.scale * LOG2E), vec4<f32>(-stat[$i].x)));
      var ds = x * (dp[$iu * RN4 + $gu] - vec4<f32>(stat[$i].y));
#endif
      if (masked) {
        let key = vec4<u32>(j0 + 4u * (tx + TX * $gu)) + vec4<u32>(0u, 1u, 2u, 3u);
        ds = select(vec4<f32>(0.0), ds, (key >= vec4<u32>(low[$i])) & (key <= vec4<u32>(t0 + $iu * TY + ty)));
      }
      p_tile[$i][ty].at[(tx + TX * $gu) / VN4][(tx + TX * $gu) % VN4] = ds;
    }
#end
#end

    for (var part = 0u; part < NV; part++) {
      if (part > 0u) { workgroupBarrier(); }
      put_rows(fetch_k_rows(b, kv_head, j0 + part * VN, p.queries, lid), lid);
      workgroupBarrier();
#include "attention.inc.wgsl" accumulate sum=acc
    }
  }

#unroll i RM
  {
    let t = t0 + $iu * TY + ty;
    if (t < p.queries) {
#unroll r RD
      store_dq(((split * p.batch + b) * p.queries + t) * p.heads + h, tx + TX * $ru, acc[$iu * RD + $ru] * p.scale);
#end
    }
  }
#end
}
