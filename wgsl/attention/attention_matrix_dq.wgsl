// attention_backward_dq.wgsl on tensor cores: dq, with f16 q, k, v, do and f32 sums. Heads have WIDTH elements, a
// multiple of 32.
//
// Operands, masks and dispatch are those of attention_backward_dq.wgsl. Rows, tiles and the path of the scores through
// workgroup memory are those of attention_matrix.wgsl. ds is rounded to f16 for the matmul with k; dq is scaled at the
// end. Dao, FlashAttention-2 (arXiv:2307.08691), algorithm 2. Needs subgroups of LANES.
enable f16;
enable wgpu_cooperative_matrix;

#include "attention.inc.wgsl" dq_bindings
#include "common.inc.wgsl" eight

const THREADS: u32 = $SG_LANESu * SG;
#include "attention_matrix.inc.wgsl" tiles

var<workgroup> ds_tile: array<vec4<f16>, BM * S_LD - 2u>;

@compute @workgroup_size(THREADS)
fn main(
#include "attention_matrix.inc.wgsl" builtins
) {
#include "attention_matrix.inc.wgsl" rows

  let low = first_seen(doc_start[b * p.queries + t], t);
  let first_key = first_seen(doc_start[b * p.queries + t0], t0);
  let last_low = first_seen(doc_start[b * p.queries + t_last], t_last);
  let stat = stats[(b * p.heads + h) * p.queries + t];
  let first_tile = first_key / BN + split;
  let tiles = (max(t_last / BN + 1u, first_tile) - first_tile + p.splits - 1u) / p.splits;

#include "attention_matrix.inc.wgsl" left x=dy first=t0 heads=heads head=h row=first_row blocks=BLOCKS
#include "attention_matrix.inc.wgsl" load x=k place=0u loads=LOADS_COLUMNS first=first_tile*BN end=p.queries tokens=queries heads=kv_heads head=kv_head
#include "attention_matrix.inc.wgsl" load x=v place=BN loads=LOADS_COLUMNS first=first_tile*BN end=p.queries tokens=queries heads=kv_heads head=kv_head

  for (var n = 0u; n < tiles; n++) {
    let j0 = (first_tile + n * p.splits) * BN;
    workgroupBarrier();
#include "attention_matrix.inc.wgsl" score name=s x=q row=side*(16u*$NF_OWNu)
#include "attention_matrix.inc.wgsl" keep_score name=s
#include "attention_matrix.inc.wgsl" score name=dp x=dy row=BN+side*(16u*$NF_OWNu)
    workgroupBarrier();
#unroll i PAIRS
    var e_$i = exp2(strips[mine + $ROW_LANESu * $iu] * to_base2 - vec4<f32>(stat.x));
    if (j0 + BN > t0 + 1u || j0 < last_low) {
      let key = vec4<u32>(j0 + 4u * ($ROW_LANESu * $iu + half)) + vec4<u32>(0u, 1u, 2u, 3u);
      e_$i = select(vec4<f32>(), e_$i, (key >= vec4<u32>(low)) & (key <= vec4<u32>(t)));
    }
#end
    // dp reuses the strips of the scores: two more barriers, but more workgroups fit on a compute unit.
    workgroupBarrier();
#include "attention_matrix.inc.wgsl" keep_score name=dp
    workgroupBarrier();
#unroll i PAIRS
    ds_tile[row * S_LD + half + $ROW_LANESu * $iu] = vec4<f16>(e_$i * (strips[mine + $ROW_LANESu * $iu] - vec4<f32>(stat.y)));
#end
    let next_j0 = j0 + p.splits * BN;
#include "attention_matrix.inc.wgsl" fetch x=k y=v first=next_j0 heads=kv_heads head=kv_head
    workgroupBarrier();
#include "attention_matrix.inc.wgsl" sums left=ds_tile place=0u
    workgroupBarrier();
#include "attention_matrix.inc.wgsl" stage x=k place=0u
#include "attention_matrix.inc.wgsl" stage x=v place=BN
  }

#include "attention_matrix.inc.wgsl" store y=dq type=DQ_T factor=p.scale
}
