// Part of attention_matrix.wgsl and attention_matrix_dq.wgsl: the queries of each subgroup as left operands, which pass
// through the tile of keys and values.
  let ld = KV_LD;
  let ld_s = S_LD;
  let ld_p = P_LD;
#include "attention_matrix_load.wgsl" loads=LOADS_ROWS x=q first=t0 end=p.queries tokens=queries heads=heads head=h place=0u tile=kv_tile ld=KV_LD
  workgroupBarrier();
#unroll c DF
  let q_at_$c = subgroup * 16u * KV_LD + 4u * $cu;
  let q_$c = coopLoadT<coop_mat16x16<f16, A>>(&kv_tile[q_at_$c], ld);
#end
