// Part of attention_matrix_dq.wgsl and attention_matrix_dkv.wgsl: the left operands $x and $y times $count x 16 rows of each half
// of `tile`, from row $first on, into the strips from $strip on: scores, and dp.
#unroll r RF
#unroll j $count
    var s_$r_$j = coop_mat16x16<f32, C>();
    var dp_$r_$j = coop_mat16x16<f32, C>();
#end
#end
#unroll part LEFT_PARTS
#unroll c LEFT_DF
#unroll j $count
    {
      let x_at_$j = ($first + 16u * $ju) * TILE_LD + LEFT_W8 * $partu + 2u * $cu;
      let x_b = coopLoad<coop_mat16x16<f16, B>>(&tile[x_at_$j].low, ld);
      let y_at_$j = ($first + BN + 16u * $ju) * TILE_LD + LEFT_W8 * $partu + 2u * $cu;
      let y_b = coopLoad<coop_mat16x16<f16, B>>(&tile[y_at_$j].low, ld);
#unroll r RF
      s_$r_$j = coopMultiplyAdd($x_$part_$r_$c, x_b, s_$r_$j);
      dp_$r_$j = coopMultiplyAdd($y_$part_$r_$c, y_b, dp_$r_$j);
#end
    }
#end
#end
#end
#unroll r RF
#unroll j $count
    let s_from_$r_$j = $strip + 16u * $ru * S_LD + 4u * $ju;
    coopStoreT(s_$r_$j, &strips[s_from_$r_$j], ld_s);
#if !ONE_STRIP
    coopStoreT(dp_$r_$j, &dp_strips[s_from_$r_$j], ld_s);
#endif
#end
#end
