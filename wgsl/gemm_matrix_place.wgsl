// Part of gemm_matrix_stage.wgsl: unit $i of the operand $x, which is in $from_$x_$i and has $eights times 8 elements. $inside: its
// place along K, as select takes it.
  {
    let unit = ready_$x($from_$x_$i);
#if K_EDGE
    let inside = k0 + select($inside) < k_last;
#endif
#unroll e $eights
    {
      let to = $x_row_$i * $ld + $x_col_$i / 8u + $eu;
#if K_EDGE
      $x_tile[to] = Eight(select(vec4<f16>(), four_$x(unit, 8u * $eu), inside), select(vec4<f16>(), four_$x(unit, 8u * $eu + 4u), inside));
#else
      $x_tile[to] = Eight(four_$x(unit, 8u * $eu), four_$x(unit, 8u * $eu + 4u));
#endif
    }
#end
  }
