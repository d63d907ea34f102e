// Part of attention_matrix.wgsl and attention_matrix_dq.wgsl: $left, of which a subgroup has 16 rows, times BN rows of `tile`, from
// row $place on, added to acc.
#unroll j NF
    {
      let left_at = subgroup * 16u * S_LD + 4u * $ju;
      let left = coopLoadT<coop_mat16x16<f16, A>>(&$left[left_at], ld_s);
#unroll g OUT_PARTS
#unroll c NF
      {
        let right_at_$c = ($place + 16u * $ju) * TILE_LD + 2u * ($gu * NF + $cu);
        let right = coopLoadT<coop_mat16x16<f16, B>>(&tile[right_at_$c].low, ld);
        acc_$g_$c = coopMultiplyAdd(left, right, acc_$g_$c);
      }
#end
#end
    }
#end
