// Part of gemm_matrix.wgsl: ranks s0 to s0 + TILE_K of a part of the LoRA term into workgroup memory, one piece of them.
// Everything is read before anything is written, so that all reads are under way together.
#unroll i LOADS_A
        let u_place_$i = place_of(lid + $iu * THREADS, A_COLS / 8u, 1u);
#if TRANS_A
        let u_row_$i = m0 + 8u * u_place_$i.y;
        let u_low_$i = four_u(u_row_$i, part, s0 + u_place_$i.x, rank);
        let u_high_$i = four_u(u_row_$i + 4u, part, s0 + u_place_$i.x, rank);
#else
        let u_rank_$i = s0 + 8u * u_place_$i.y;
        let u_low_$i = four_u(m0 + u_place_$i.x, part, u_rank_$i, rank);
        let u_high_$i = four_u(m0 + u_place_$i.x, part, u_rank_$i + 4u, rank);
#endif
#end
#unroll i LOADS_V
        let v_place_$i = place_of(lid + $iu * THREADS, B_COLS / 8u, 1u);
#if TRANS_B
        let v_rank_$i = s0 + 8u * v_place_$i.y;
        let v_low_$i = four_v(n0 + v_place_$i.x, part, v_rank_$i, rank);
        let v_high_$i = four_v(n0 + v_place_$i.x, part, v_rank_$i + 4u, rank);
#else
        let v_column_$i = n0 + 8u * v_place_$i.y;
        let v_low_$i = four_v(v_column_$i, part, s0 + v_place_$i.x, rank);
        let v_high_$i = four_v(v_column_$i + 4u, part, s0 + v_place_$i.x, rank);
#endif
#end
#unroll i LOADS_A
        let u_to_$i = u_place_$i.x * A_LD + u_place_$i.y;
        a_tile[u_to_$i] = Eight(piece_of(u_low_$i, piece == 1u), piece_of(u_high_$i, piece == 1u));
#end
#unroll i LOADS_V
        let v_to_$i = v_place_$i.x * B_LD + v_place_$i.y;
        b_tile[v_to_$i] = Eight(piece_of(v_low_$i, piece == 2u), piece_of(v_high_$i, piece == 2u));
#end
