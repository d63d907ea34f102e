// Part of attention_matrix.wgsl and attention_matrix_dq.wgsl: acc times $factor_0, ... to the workgroup's rows of $y, through the
// strips.
#unroll r RF
  let stores_$r = t0 + row_$r < p.queries && !extra;
  let out_$r = (((split * p.batch + b) * p.queries + t_$r) * p.heads + h) * W4;
#end
#unroll g OUT_PARTS
  workgroupBarrier();
#unroll r RF
#unroll j NF
  let out_from_$r_$g_$j = strip + 16u * $ru * S_LD + 4u * $ju;
  coopStoreT(acc_$r_$g_$j, &strips[out_from_$r_$g_$j], ld_s);
#end
#end
  workgroupBarrier();
#unroll r RF
#unroll i PAIRS
  if (stores_$r) { $y[out_$r + 4u * NF * $gu + 2u * $iu + half] = $type(strips[mine_$r + 2u * $iu] * $factor_$r); }
#end
#end
#end
