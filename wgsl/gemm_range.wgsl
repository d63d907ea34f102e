// Part of gemm.wgsl and gemm_matrix.wgsl: what of K the workgroup multiplies, and where its operands and results begin.
#if GROUPED
  // Eight rows of tiles go along N together, so that B is read from memory once for all of them.
  let columns = (p.n + TILE_N - 1u) / TILE_N;
  let tile_id = wg.y * columns + wg.x;
  let first_row = tile_id / (8u * columns) * 8u;
  let rows = min(8u, (p.m + TILE_M - 1u) / TILE_M - first_row);
  let place = tile_id % (8u * columns);
  let m0 = (first_row + place % rows) * TILE_M;
  let n0 = place / rows * TILE_N;
#else
  let m0 = wg.y * TILE_M;
  let n0 = wg.x * TILE_N;
#endif
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
