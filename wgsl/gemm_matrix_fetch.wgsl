// Part of gemm_matrix.wgsl: one tile of A and B, from row or column k0 of K on, into registers. Without a branch, so that all
// loads are under way together: what lies beyond an edge is read from the edge (beyond the edges of C it is never stored;
// beyond the end of K it is replaced by zero when it is staged), and nothing waits for what it has read.
#unroll i LOADS_A
#if TRANS_A
  let a_from_$i = a_base + inside_k(k0 + a_row_$i, 1u) * p.lda + p.a_col + min(m0 + a_col_$i, p.m - 8u);
#else
  let a_from_$i = a_base + min(m0 + a_row_$i, p.m - 1u) * p.lda + p.a_col + inside_k(k0 + a_col_$i, 8u);
#endif
  let next_a_$i = fetch_a(a_from_$i, 8u);
#end
#unroll i LOADS_B
#if TRANS_B
  let b_from_$i = b_base + min(n0 + b_row_$i, p.n - 1u) * p.k + inside_k(k0 + b_col_$i, UNIT);
#else
  let b_from_$i = b_base + inside_k(k0 + b_row_$i, 1u) * p.n + min(n0 + b_col_$i, p.n - UNIT);
#endif
  let next_b_$i = fetch_b(b_from_$i, UNIT);
#end
