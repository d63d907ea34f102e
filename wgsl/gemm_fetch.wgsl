// Part of gemm.wgsl: one tile of A and B, from row or column k0 of K on, into registers. Where a tile has EDGES, rows and
// columns beyond those of C repeat the last one, as they are never stored, and beyond k_last there are zeros.
#unroll i LOADS_A
  {
    let at = lid + $iu * THREADS;
#if TRANS_A
    let row = k0 + at / M4;
    let col = m0 + (at % M4) * 4u;
#if EDGES
    next_a[$i] = vec4<f32>(0.0);
    if (row < k_last && col < p.m)
#endif
    { next_a[$i] = fetch_a(a_base + row * p.lda + p.a_col + col, p.m - col); }
#else
    let row = inside(m0 + at / (TILE_K / 4u), p.m);
    let col = k0 + (at % (TILE_K / 4u)) * 4u;
#if EDGES
    next_a[$i] = vec4<f32>(0.0);
    if (col < k_last)
#endif
    { next_a[$i] = fetch_a(a_base + row * p.lda + p.a_col + col, k_last - col); }
#endif
  }
#end
#unroll i LOADS_B
  {
    let at = lid + $iu * THREADS;
#if TRANS_B
    let row = inside(n0 + at / (TILE_K / UNIT), p.n);
    let col = k0 + (at % (TILE_K / UNIT)) * UNIT;
#if EDGES
    next_b[$i] = Ready_b();
    if (col < k_last)
#endif
    { next_b[$i] = ready_b(fetch_b(b_base + row * p.k + col, k_last - col)); }
#else
    let row = k0 + at / (TILE_N / UNIT);
    let col = n0 + (at % (TILE_N / UNIT)) * UNIT;
#if EDGES
    next_b[$i] = Ready_b();
    if (row < k_last && col < p.n)
#endif
    { next_b[$i] = ready_b(fetch_b(b_base + row * p.n + col, p.n - col)); }
#endif
  }
#end
