// Part of gemm.wgsl: what was fetched of A and B, decoded, into workgroup memory.
#unroll i LOADS_A
  {
    let at = lid + $iu * THREADS;
#if TRANS_A
    if (at < TILE_K * M4) { a_tile[at / M4][at % M4] = next_a[$i]; }
#else
    if (at < TILE_M * (TILE_K / 4u)) {
      let row = at / (TILE_K / 4u);
      let kq = (at % (TILE_K / 4u)) * 4u;
#unroll e 4
      a_tile[kq + $eu][row >> 2u][row & 3u] = next_a[$i][$e];
#end
    }
#endif
  }
#end
#unroll i LOADS_B
  {
    let at = lid + $iu * THREADS;
#if TRANS_B
    if (at < TILE_N * (TILE_K / UNIT)) {
      let col = at / (TILE_K / UNIT);
      let ku = (at % (TILE_K / UNIT)) * UNIT;
#unroll q QUADS
      let four_$q = four_b(next_b[$i], 4u * $qu);
#unroll e 4
      b_tile[ku + 4u * $qu + $eu][col >> 2u][col & 3u] = four_$q[$e];
#end
#end
    }
#else
    if (at < TILE_K * (TILE_N / UNIT)) {
      let row = at / (TILE_N / UNIT);
      let cu = (at % (TILE_N / UNIT)) * QUADS;
#unroll q QUADS
      b_tile[row][cu + $qu] = four_b(next_b[$i], 4u * $qu);
#end
    }
#endif
  }
#end
