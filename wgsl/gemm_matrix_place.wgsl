// Part of gemm_matrix_stage.wgsl: unit $i of the operand $x, which is in $from_$x_$i. $inside: its place along K, as select takes it.
  {
    let to = $x_row_$i * $ld + $x_col_$i / 8u;
    let unit = ready_$x($from_$x_$i);
#if K_EDGE
    let inside = k0 + select($inside) < k_last;
    $x_tile[to] = Eight(select(vec4<f16>(), four_$x(unit, 0u), inside), select(vec4<f16>(), four_$x(unit, 4u), inside));
#else
    $x_tile[to] = Eight(four_$x(unit, 0u), four_$x(unit, 4u));
#endif
  }
