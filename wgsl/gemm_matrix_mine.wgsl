// Part of gemm_matrix.wgsl: what of a tile of $x the invocation carries, $loads units of 8 elements: their rows and columns in it.
#unroll i $loads
  let $x_place_$i = place_of(lid + $iu * THREADS, $cols / 8u);
  let $x_row_$i = $x_place_$i.x;
  let $x_col_$i = $x_place_$i.y * 8u;
#end
