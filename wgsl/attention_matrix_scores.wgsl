// Part of attention_matrix_dq.wgsl and attention_matrix_dkv.wgsl: the left operands $x and $y times $count x 16 rows of each half
// of `tile`, from row $first on: scores s_0, s_1, ..., and dp_0, dp_1, ...
#unroll j $count
    var s_$j = coop_mat16x16<f32, C>();
    var dp_$j = coop_mat16x16<f32, C>();
#end
#unroll part LEFT_PARTS
#unroll c LEFT_DF
#unroll j $count
    {
      let x_at_$j = ($first + 16u * $ju) * TILE_LD + LEFT_W8 * $partu + 2u * $cu;
      let x_b = coopLoad<coop_mat16x16<f16, B>>(&tile[x_at_$j].low, ld);
      let y_at_$j = ($first + BN + 16u * $ju) * TILE_LD + LEFT_W8 * $partu + 2u * $cu;
      let y_b = coopLoad<coop_mat16x16<f16, B>>(&tile[y_at_$j].low, ld);
      s_$j = coopMultiplyAdd($x_$part_$c, x_b, s_$j);
      dp_$j = coopMultiplyAdd($y_$part_$c, y_b, dp_$j);
    }
#end
#end
#end
