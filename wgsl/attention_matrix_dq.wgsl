// dq of attention_backward_dq.wgsl on matrix units: f16 q, k, v, do; f32 sums. Heads of WIDTH elements, a multiple of 32.
//
// Operands, masks and dispatch are those of attention_backward_dq.wgsl; rows, tiles and the way of the scores through
// workgroup memory those of attention_matrix.wgsl. ds goes as f16 into the product with k, the scale into dq.
// Dao, FlashAttention-2 (arXiv:2307.08691), algorithm 2. Wants: subgroups of 32.
enable f16;
enable wgpu_cooperative_matrix;

struct Params {
  batch: u32, queries: u32, heads: u32, kv_heads: u32,
  query_tiles: u32, splits: u32, window: u32, scale: f32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(7) var<storage, read_write> dq: array<DQ_T>;

#include "attention_backward_bindings.wgsl"

const THREADS: u32 = 32u * SG;
const BM: u32 = 16u * SG;
const KV_LD: u32 = W4 + 2u;
const S_LD: u32 = BN / 4u + 2u;
const P_LD: u32 = BN / 4u + 2u;

var<workgroup> kv_tile: array<vec4<f16>, 2u * BN * KV_LD>;  // BN rows of k, then BN of v; before that q, do (BM <= 2 BN)
var<workgroup> strips: array<vec4<f32>, BM * S_LD>;
var<workgroup> dp_strips: array<vec4<f32>, BM * S_LD>;
var<workgroup> ds_tile: array<vec4<f16>, BM * P_LD>;

@compute @workgroup_size(THREADS)
fn main(
  @builtin(workgroup_id) wg: vec3<u32>,
  @builtin(num_workgroups) nwg: vec3<u32>,
  @builtin(local_invocation_index) lid: u32,
) {
#include "attention_matrix_rows.wgsl"

  let low = first_seen(doc_start[b * p.queries + t], t);
  let first_key = first_seen(doc_start[b * p.queries + t0], t0);
  let last_low = first_seen(doc_start[b * p.queries + t_last], t_last);
  let stat = stats[(b * p.heads + h) * p.queries + t];
  let first_tile = first_key / BN + split;
  let tiles = (max(t_last / BN + 1u, first_tile) - first_tile + p.splits - 1u) / p.splits;

#include "attention_matrix_queries.wgsl"
  workgroupBarrier();
#include "attention_matrix_load.wgsl" loads=LOADS_ROWS x=dy first=t0 end=p.queries tokens=queries heads=heads head=h place=0u tile=kv_tile ld=KV_LD
  workgroupBarrier();
#unroll c DF
  let dy_$c = coopLoadT<coop_mat16x16<f16, A>>(&kv_tile[q_at_$c], ld);
#end
#unroll g OUT_PARTS
#unroll j NF
  var acc_$g_$j = coop_mat16x16<f32, C>();
#end
#end
  workgroupBarrier();
  let to_base2 = p.scale * LOG2E;
  let strip = subgroup * 16u * S_LD;
  let mine = row * S_LD + half;
#include "attention_matrix_load.wgsl" x=k place=0u loads=LOADS_COLUMNS first=first_tile*BN end=p.queries tokens=queries heads=kv_heads head=kv_head tile=kv_tile ld=KV_LD
#include "attention_matrix_load.wgsl" x=v place=BN loads=LOADS_COLUMNS first=first_tile*BN end=p.queries tokens=queries heads=kv_heads head=kv_head tile=kv_tile ld=KV_LD

  for (var n = 0u; n < tiles; n++) {
    let j0 = (first_tile + n * p.splits) * BN;
    workgroupBarrier();
#unroll j NF
    var s_$j = coop_mat16x16<f32, C>();
    var dp_$j = coop_mat16x16<f32, C>();
#end
#unroll c DF
#unroll j NF
    {
      let k_at = (16u * $ju) * KV_LD + 4u * $cu;
      let v_at = (BN + 16u * $ju) * KV_LD + 4u * $cu;
      let k_b = coopLoad<coop_mat16x16<f16, B>>(&kv_tile[k_at], ld);
      let v_b = coopLoad<coop_mat16x16<f16, B>>(&kv_tile[v_at], ld);
      s_$j = coopMultiplyAdd(q_$c, k_b, s_$j);
      dp_$j = coopMultiplyAdd(dy_$c, v_b, dp_$j);
    }
#end
#end
#unroll j NF
    let s_at_$j = strip + 4u * $ju;
    coopStoreT(s_$j, &strips[s_at_$j], ld_s);
    coopStoreT(dp_$j, &dp_strips[s_at_$j], ld_s);
#end
    workgroupBarrier();
#unroll i PAIRS
    {
      var e = exp2(strips[mine + 2u * $iu] * to_base2 - vec4<f32>(stat.x));
      if (j0 + BN > t0 + 1u || j0 < last_low) {
        let key = vec4<u32>(j0 + 4u * (2u * $iu + half)) + vec4<u32>(0u, 1u, 2u, 3u);
        e = select(vec4<f32>(), e, (key >= vec4<u32>(low)) & (key <= vec4<u32>(t)));
      }
      ds_tile[row * P_LD + half + 2u * $iu] = vec4<f16>(e * (dp_strips[mine + 2u * $iu] - vec4<f32>(stat.y)));
    }
#end
    let next_j0 = j0 + p.splits * BN;
#unroll n LOADS_COLUMNS
    let at_$n = lid + $nu * THREADS;
    let source_$n = ((b * p.queries + min(next_j0 + at_$n / W4, p.queries - 1u)) * p.kv_heads + kv_head) * W4 + at_$n % W4;
    let k_next_$n = k[source_$n];
    let v_next_$n = v[source_$n];
#end
    workgroupBarrier();
#unroll j NF
    {
      let ds_at = subgroup * 16u * P_LD + 4u * $ju;
      let ds_a = coopLoadT<coop_mat16x16<f16, A>>(&ds_tile[ds_at], ld_p);
#unroll g OUT_PARTS
#unroll c NF
      {
        let at = (16u * $ju) * KV_LD + 4u * ($gu * NF + $cu);
        let k_b = coopLoadT<coop_mat16x16<f16, B>>(&kv_tile[at], ld);
        acc_$g_$c = coopMultiplyAdd(ds_a, k_b, acc_$g_$c);
      }
#end
#end
    }
#end
    workgroupBarrier();
#unroll n LOADS_COLUMNS
    kv_tile[(at_$n / W4) * KV_LD + at_$n % W4] = k_next_$n;
    kv_tile[(BN + at_$n / W4) * KV_LD + at_$n % W4] = v_next_$n;
#end
  }

  let stores = t0 + row < p.queries && !extra;
  let out = (((split * p.batch + b) * p.queries + t) * p.heads + h) * W4;
#unroll g OUT_PARTS
  workgroupBarrier();
#unroll j NF
  let out_at_$g_$j = strip + 4u * $ju;
  coopStoreT(acc_$g_$j, &strips[out_at_$g_$j], ld_s);
#end
  workgroupBarrier();
#unroll i PAIRS
  if (stores) { dq[out + 4u * NF * $gu + 2u * $iu + half] = DQ_T(strips[mine + 2u * $iu] * p.scale); }
#end
#end
}
