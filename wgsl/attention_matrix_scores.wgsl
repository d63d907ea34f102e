// Part of attention_matrix_dq.wgsl and attention_matrix_dkv.wgsl: the left operands $x and $y times $count x 16 rows of each half
// of `tile`, from row $first on, into the strips from $strip on: scores, and dp.
#unroll j $count
    var s_$j = coop_mat16x16<f32, C>();
    var dp_$j = coop_mat16x16<f32, C>();
#end
#unroll c DF
#unroll j $count
    {
      let x_at = ($first + 16u * $ju) * TILE_LD + 4u * $cu;
      let y_at = x_at + BN * TILE_LD;
      let x_b = coopLoad<coop_mat16x16<f16, B>>(&tile[x_at], ld);
      let y_b = coopLoad<coop_mat16x16<f16, B>>(&tile[y_at], ld);
      s_$j = coopMultiplyAdd($x_$c, x_b, s_$j);
      dp_$j = coopMultiplyAdd($y_$c, y_b, dp_$j);
    }
#end
#end
#unroll j $count
    let s_at_$j = $strip + 4u * $ju;
    coopStoreT(s_$j, &strips[s_at_$j], ld_s);
    coopStoreT(dp_$j, &dp_strips[s_at_$j], ld_s);
#end
