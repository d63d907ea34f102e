// Part of attention_matrix.wgsl and attention_matrix_dq.wgsl: $left, of which a subgroup has 16 RF rows, times BN rows of `tile`,
// from row $place on, added to acc.
#unroll j NF
    {
#unroll r RF
      let left_from_$r = (subgroup * RF + $ru) * 16u * S_LD + 4u * $ju;
      let left_$r = coopLoadT<coop_mat16x16<f16, A>>(&$left[left_from_$r], ld_s);
#end
#unroll g OUT_PARTS
#unroll c NF
      {
        let right_at_$c = ($place + 16u * $ju) * TILE_LD + 2u * ($gu * NF + $cu);
        let right = coopLoadT<coop_mat16x16<f16, B>>(&tile[right_at_$c].low, ld);
#unroll r RF
        acc_$r_$g_$c = coopMultiplyAdd(left_$r, right, acc_$r_$g_$c);
#end
      }
#end
#end
    }
#end
