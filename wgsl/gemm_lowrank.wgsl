// Part of gemm.wgsl and gemm_int8.wgsl: one tile of the LoRA term into workgroup memory, ranks s0 to s0 + TILE_K. alpha scales
// the sum at the end, so it is taken out here.
fn load_lowrank(s0: u32, m0: u32, n0: u32, lid: u32) {
  for (var at = lid; at < TILE_M * TILE_K; at += THREADS) {
    let row = at / TILE_K;
    let s = at % TILE_K;
    var x = 0.0;
    if (s0 + s < p.rank) { x = u[min(m0 + row, p.m - 1u) * p.ld_u + part_of(n0) * p.rank + s0 + s] / p.alpha; }
    a_tile[s][row >> 2u][row & 3u] = kept(x);
  }
  for (var at = lid; at < TILE_N * TILE_K; at += THREADS) {
#if TRANS_B
    let col = at / TILE_K;
    let s = at % TILE_K;
    let source = (p.c_col + min(n0 + col, p.n - 1u)) * p.rank + s0 + s;
#else
    let col = at % TILE_N;
    let s = at / TILE_N;
    let source = (s0 + s) * p.n + min(n0 + col, p.n - 1u);
#endif
    var x = 0.0;
    if (s0 + s < p.rank) { x = v[source]; }
    b_tile[s][col >> 2u][col & 3u] = kept(x);
  }
}
