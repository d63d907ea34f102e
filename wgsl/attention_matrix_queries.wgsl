// Part of attention_matrix.wgsl and attention_matrix_dq.wgsl: the queries of each subgroup as left operands, which pass
// through the tile of keys and values.
  let ld = KV_LD;
  let ld_s = S_LD;
  let ld_p = P_LD;
#unroll n LOADS_ROWS
  {
    let at = lid + $nu * THREADS;
    let t_q = min(t0 + at / W4, p.queries - 1u);
    kv_tile[(at / W4) * KV_LD + at % W4] = q[((b * p.queries + t_q) * p.heads + h) * W4 + at % W4];
  }
#end
  workgroupBarrier();
#unroll c DF
  let q_at_$c = subgroup * 16u * KV_LD + 4u * $cu;
  let q_$c = coopLoadT<coop_mat16x16<f16, A>>(&kv_tile[q_at_$c], ld);
#end
