// Part of gemm_int8.wgsl: a block of K of both operands, and their scales, into registers.
#unroll i LOADS_A
  {
    let at = lid + $iu * THREADS;
    next_a[$i] = a[(block * TILE_K + at / M4) * a_line + m0 / 4u + at % M4];
  }
#end
#unroll i LOADS_B
  {
    let at = lid + $iu * THREADS;
    next_b[$i] = b[(block * TILE_K + at / N4) * b_line + n0 / 4u + at % N4];
  }
#end
  next_a_scale = a_scales[block * a_line + m0 / 4u + lid % M4];
  next_b_scale = b_scales[block * b_line + n0 / 4u + lid % N4];
