// Part of gemm_matrix.wgsl: what of a tile of $x the invocation carries, $loads units of $unit elements: their rows and columns.
#unroll i $loads
  let $x_place_$i = place_of(lid + $iu * THREADS, $cols / $unit, $unit / 8u);
  let $x_row_$i = $x_place_$i.x;
  let $x_col_$i = $x_place_$i.y * $unit;
#end
