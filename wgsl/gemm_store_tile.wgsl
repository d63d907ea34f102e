// Part of gemm.wgsl and gemm_int8.wgsl: the sums of an invocation to their places in C.
#unroll i TM4
#unroll r 4
  {
    let row = m0 + (ty + $iu * TY) * 4u + $ru;
    if (row < p.m) {
#unroll j TN4
      {
        let col = n0 + (tx + $ju * TX) * 4u;
        store(row, col, c_base, acc[$i * 4 + $r][$j]);
      }
#end
    }
  }
#end
#end
