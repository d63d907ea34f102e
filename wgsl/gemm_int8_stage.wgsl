// Part of gemm_int8.wgsl: what was fetched, into workgroup memory.
#unroll i LOADS_A
  {
    let at = lid + $iu * THREADS;
    a_tile[at / M4][at % M4] = next_a[$i];
  }
#end
#unroll i LOADS_B
  {
    let at = lid + $iu * THREADS;
    b_tile[at / N4][at % N4] = next_b[$i];
  }
#end
  if (lid < M4) { a_scale[lid] = next_a_scale; }
  if (lid < N4) { b_scale[lid] = next_b_scale; }
