// Part of the tiled attention kernels: $sum += the scores of p_tile times the rows of row_tile, both of `part`.
#unroll n VN4
#unroll r RD
      {
        let b0 = row_tile[4u * $nu][$r][tx];
        let b1 = row_tile[4u * $nu + 1u][$r][tx];
        let b2 = row_tile[4u * $nu + 2u][$r][tx];
        let b3 = row_tile[4u * $nu + 3u][$r][tx];
#unroll i RM
        {
          let a = p_tile[$i][ty].at[part][$n];
          $sum[$iu * RD + $ru] = fma(vec4<f32>(a.w), b3, fma(vec4<f32>(a.z), b2,
            fma(vec4<f32>(a.y), b1, fma(vec4<f32>(a.x), b0, $sum[$iu * RD + $ru]))));
        }
#end
      }
#end
#end
