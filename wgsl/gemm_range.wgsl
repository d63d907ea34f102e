// Part of gemm.wgsl and gemm_matrix.wgsl: what of K the workgroup multiplies, and where its operands and results begin.
  let m0 = wg.y * TILE_M;
  let n0 = wg.x * TILE_N;
#if SPLIT
  let k_first = wg.z * p.k_per_split;
  let k_last = min(p.k, k_first + p.k_per_split);
  let a_base = 0u;
  let b_base = 0u;
  let c_base = wg.z * p.m * p.n;
#else
  let k_first = 0u;
  let k_last = p.k;
  let a_base = wg.z * p.m * p.k;
  let b_base = wg.z * p.k * p.n;
  let c_base = wg.z * p.m * p.ldc;
#endif
