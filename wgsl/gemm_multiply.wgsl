// Part of gemm.wgsl and gemm_int8.wgsl: what stands in a_tile and b_tile, multiplied and added to the sums. $floats: what
// makes vec4<f32> of it, if it is something else.
#unroll k TILE_K
  {
#unroll i TM4
    let a$i = $floats(a_tile[$k][ty + $iu * TY]);
#end
#unroll j TN4
    let b$j = $floats(b_tile[$k][tx + $ju * TX]);
#end
#unroll i TM4
#unroll r 4
#unroll j TN4
    acc[$i * 4 + $r][$j] = fma(vec4<f32>(a$i[$r]), b$j, acc[$i * 4 + $r][$j]);
#end
#end
#end
  }
#end
