// Part of gemm_matrix.wgsl: four numbers of the LoRA term as they are staged, by gemm_matrix_lowrank_stage.wgsl. Ranks beyond
// the last are zeros. alpha scales the sum at the end, so it is taken out of u here.

// As f16, or with `rest` what that leaves out, again as f16.
fn piece_of(x: vec4<f32>, rest: bool) -> vec4<f16> {
#if PIECES == 1
  return vec4<f16>(x);
#else
  let high = held(x);
  return vec4<f16>(select(high, x - high, rest));
#endif
}

#if TRANS_A
// Rank s of four rows of C.
fn four_u(row: u32, part: u32, s: u32, rank: u32) -> vec4<f32> {
  var x = vec4<f32>();
#unroll e 4
  x[$e] = u[min(row + $eu, p.m - 1u) * p.ld_u + part * p.rank + min(s, p.rank - 1u)];
#end
  return select(vec4<f32>(), x * (1.0 / p.alpha), s < rank);
}
#else
// Four ranks, s to s + 3, of a row of C.
fn four_u(row: u32, part: u32, s: u32, rank: u32) -> vec4<f32> {
  let first = min(row, p.m - 1u) * p.ld_u + part * p.rank;
#if VEC_U
  return select(vec4<f32>(), u[(first + min(s, p.rank - 4u)) / 4u] * (1.0 / p.alpha), s < rank);
#else
  var x = vec4<f32>();
#unroll e 4
  x[$e] = select(0.0, u[first + min(s + $eu, p.rank - 1u)] * (1.0 / p.alpha), s + $eu < rank);
#end
  return x;
#endif
}
#endif

#if TRANS_B
// Four ranks of a column of C; zeros where it is not of the part.
fn four_v(column: u32, part: u32, s: u32, rank: u32) -> vec4<f32> {
  let at = min(column, p.n - 1u);
  let first = (p.c_col + at) * p.rank;
  let mine = part_of(at) == part;
#if VEC_V
  return select(vec4<f32>(), v[(first + min(s, p.rank - 4u)) / 4u], mine && s < rank);
#else
  var x = vec4<f32>();
#unroll e 4
  x[$e] = select(0.0, v[first + min(s + $eu, p.rank - 1u)], mine && s + $eu < rank);
#end
  return x;
#endif
}
#else
// Rank s of four columns of C, which are of one part.
fn four_v(column: u32, part: u32, s: u32, rank: u32) -> vec4<f32> {
  let at = min(column, p.n - 4u);
  return select(vec4<f32>(), v[(min(s, p.rank - 1u) * p.n + at) / 4u], s < rank && part_of(at) == part);
}
#endif
