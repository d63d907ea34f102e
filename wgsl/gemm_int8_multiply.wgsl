// Part of gemm_int8.wgsl: what stands in the tiles, multiplied and added to the sums. An integer sum is below 2^21 and begins with
// the bits of 1.5 * 2^23, so that its own are those of a float that much larger: an addition turns it into one.
  {
#unroll i TM4
#unroll r 4
#unroll j TN4
    var sum_$i_$r_$j = vec4<i32>(0x4b400000);
#end
#end
#end
#unroll k TILE_K
    {
#unroll i TM4
      let a$i = a_tile[$k][ty + $iu * TY];
#end
#unroll j TN4
      let b$j = b_tile[$k][tx + $ju * TX];
#end
#unroll i TM4
#unroll r 4
#unroll j TN4
      sum_$i_$r_$j += vec4<i32>(dot4I8Packed(a$i[$r], b$j[0]), dot4I8Packed(a$i[$r], b$j[1]),
                                dot4I8Packed(a$i[$r], b$j[2]), dot4I8Packed(a$i[$r], b$j[3]));
#end
#end
#end
    }
#end
#unroll j TN4
    let by_b$j = b_scale[tx + $ju * TX];
#end
#unroll i TM4
    let by_a$i = a_scale[ty + $iu * TY];
#unroll r 4
#unroll j TN4
    acc[$i * 4 + $r][$j] =
      fma(bitcast<vec4<f32>>(sum_$i_$r_$j) - vec4<f32>(12582912.0), by_a$i[$r] * by_b$j, acc[$i * 4 + $r][$j]);
#end
#end
#end
  }
