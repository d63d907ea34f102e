// Part of the tiled attention kernels, for 4 columns $c of D and 4 columns $g of scores: $sum += $left . $right.
      {
        let b0 = $right[4u * $gu][tx][$c];
        let b1 = $right[4u * $gu + 1u][tx][$c];
        let b2 = $right[4u * $gu + 2u][tx][$c];
        let b3 = $right[4u * $gu + 3u][tx][$c];
        let bx = vec4<f32>(b0.x, b1.x, b2.x, b3.x);
        let by = vec4<f32>(b0.y, b1.y, b2.y, b3.y);
        let bz = vec4<f32>(b0.z, b1.z, b2.z, b3.z);
        let bw = vec4<f32>(b0.w, b1.w, b2.w, b3.w);
#unroll i RM
        {
          let a = $left[$c];
          $sum[$iu * RN4 + $gu] = fma(vec4<f32>(a.w), bw, fma(vec4<f32>(a.z), bz,
            fma(vec4<f32>(a.y), by, fma(vec4<f32>(a.x), bx, $sum[$iu * RN4 + $gu]))));
        }
#end
      }
