// Part of gemm_matrix.wgsl: what stands in a_tile and b_tile, multiplied and added to the sums.
#unroll s K_STEPS
  {
#unroll i SUB_M
#if TRANS_A
    let a_at_$i = $su * (16u * A_LD) + (sub_row + 16u * $iu) / 8u;
    let a_$i = coopLoad<coop_mat16x16<f16, A>>(&a_tile[a_at_$i].low, lda);
#else
    let a_at_$i = (sub_row + 16u * $iu) * A_LD + 2u * $su;
    let a_$i = coopLoadT<coop_mat16x16<f16, A>>(&a_tile[a_at_$i].low, lda);
#endif
#end
#unroll g SUB_G
#unroll j SUB_J
#if TRANS_B
    let b_at_$g_$j = (sub_col + 16u * ($gu * SUB_J + $ju)) * B_LD + 2u * $su;
    let b_$g_$j = coopLoad<coop_mat16x16<f16, B>>(&b_tile[b_at_$g_$j].low, ldb);
#else
    let b_at_$g_$j = $su * (16u * B_LD) + (sub_col + 16u * ($gu * SUB_J + $ju)) / 8u;
    let b_$g_$j = coopLoadT<coop_mat16x16<f16, B>>(&b_tile[b_at_$g_$j].low, ldb);
#endif
#end
#end
#unroll i SUB_M
#unroll g SUB_G
#unroll j SUB_J
    acc_$i_$g_$j = coopMultiplyAdd(a_$i, b_$g_$j, acc_$i_$g_$j);
#end
#end
#end
  }
#end
