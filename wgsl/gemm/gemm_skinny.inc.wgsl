// Parts of gemm_skinny.wgsl and gemm_matrix_skinny.wgsl.

#part parameters
// Part of gemm_skinny.wgsl and gemm_matrix_skinny.wgsl: parameters, and the index of a result.
struct Params {
  rows: u32, columns: u32, rank: u32, ld_s: u32,
  ld_c: u32, first_rank: u32, column_1: u32, column_2: u32, part_rank: u32, zero: u32, alpha: f32,
  k_per_split: u32, split_size: u32,  // of gemm_matrix_skinny.wgsl
  first_tile: u32,  // along X, of earlier dispatches
}
@group(0) @binding(0) var<uniform> p: Params;

// The index in C of rank r and row or column i of X.
fn place(i: u32, r: u32) -> u32 {
#if ALONG_ROWS
#if C_TRANS
  return i * p.ld_c + r;
#else
  return r * p.ld_c + i;
#endif
#else
  return i * p.ld_c + r;
#endif
}
#endpart

#part range
// Part of gemm_skinny.wgsl and gemm_matrix_skinny.wgsl: the range of the reduction of a workgroup whose first row or
// column of X is first_x, and the first of its ranks in S and in a row of C.
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
#endpart
