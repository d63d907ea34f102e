// Part of gemm_skinny.wgsl and gemm_matrix_skinny.wgsl: the reduction of a workgroup whose first row or column of X is first_x,
// and where the ranks that it takes begin in S and in a row of C.
#if ALONG_ROWS
  let k_first = 0u;
  let k_last = p.rows;
#if PARTS
  let part = u32(first_x >= p.column_1) + u32(first_x >= p.column_2);
  let first_s = part * p.part_rank + p.first_rank;
#else
  let first_s = p.first_rank;
#endif
  let first_c = p.first_rank;
#else
#if PARTS
  let k_first = select(select(0u, p.column_1, wg.y > 0u), p.column_2, wg.y > 1u);
  let k_last = select(select(p.column_1, p.column_2, wg.y > 0u), p.columns, wg.y > 1u);
#else
  let k_first = 0u;
  let k_last = p.columns;
#endif
  let first_s = p.first_rank;
  let first_c = wg.y * p.part_rank + p.first_rank;
#endif
