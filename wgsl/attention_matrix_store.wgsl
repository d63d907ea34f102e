// Part of attention_matrix.wgsl and attention_matrix_dq.wgsl: acc times $factor to the workgroup's rows of $y, through the strips.
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
  if (stores) { $y[out + 4u * NF * $gu + 2u * $iu + half] = $type(strips[mine + 2u * $iu] * $factor); }
#end
#end
