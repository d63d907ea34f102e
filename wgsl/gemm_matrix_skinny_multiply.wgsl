// Part of gemm_matrix_skinny.wgsl: adds what a subgroup's share of the block in workgroup memory gives.
#unroll k STEPS
    {
      let step = share + 16u * $ku;
#unroll j CF
#if ALONG_ROWS
      let x_at_$j = step * X_LD + (mine + 16u * $ju) / 8u;
      let x_$j = coopLoadT<coop_mat16x16<f16, B>>(&block[x_at_$j].low, ld_x);
#else
      let x_at_$j = (mine + 16u * $ju) * X_LD + step / 8u;
      let x_$j = coopLoadT<coop_mat16x16<f16, A>>(&block[x_at_$j].low, ld_x);
#endif
#end
#unroll i RF
#unroll piece 2
      {
#if BY_STEPS
        let s_at_$i = $pieceu * PIECES + step * S_LD + 2u * $iu;
#else
        let s_at_$i = $pieceu * PIECES + 16u * $iu * S_LD + step / 8u;
#endif
#if ALONG_ROWS
#if BY_STEPS
        let s_a = coopLoad<coop_mat16x16<f16, A>>(&pieces[s_at_$i].low, ld);
#else
        let s_a = coopLoadT<coop_mat16x16<f16, A>>(&pieces[s_at_$i].low, ld);
#endif
#unroll j CF
        acc_$i_$j = coopMultiplyAdd(s_a, x_$j, acc_$i_$j);
#end
#else
#if BY_STEPS
        let s_b = coopLoadT<coop_mat16x16<f16, B>>(&pieces[s_at_$i].low, ld);
#else
        let s_b = coopLoad<coop_mat16x16<f16, B>>(&pieces[s_at_$i].low, ld);
#endif
#unroll j CF
        acc_$i_$j = coopMultiplyAdd(x_$j, s_b, acc_$i_$j);
#end
#endif
      }
#end
#end
    }
#end
