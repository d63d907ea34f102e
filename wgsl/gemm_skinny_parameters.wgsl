// Part of gemm_skinny.wgsl and gemm_matrix_skinny.wgsl: the parameters, and where a result stands.
struct Params {
  rows: u32, columns: u32, rank: u32, ld_s: u32,
  ld_c: u32, first_rank: u32, column_1: u32, column_2: u32, part_rank: u32, zero: u32, alpha: f32,
  k_per_split: u32, split_size: u32,  // of gemm_matrix_skinny.wgsl
}
@group(0) @binding(0) var<uniform> p: Params;

// Of rank r and row or column i of X in C.
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
