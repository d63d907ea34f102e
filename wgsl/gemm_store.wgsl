// Part of gemm.wgsl and gemm_matrix.wgsl: four sums of a row into C, with alpha, bias and residual; partial sums as they are.
#if HAS_BIAS
fn bias4(at: u32) -> vec4<f32> { return vec4<f32>(bias[at], bias[at + 1u], bias[at + 2u], bias[at + 3u]); }
#endif
#if SPLIT
fn store(row: u32, col: u32, base: u32, sum: vec4<f32>) {
#if VEC_C
  if (col < p.n) { c[(base + row * p.n + col) >> 2u] = sum; }
#else
#unroll e 4
  if (col + $eu < p.n) { c[base + row * p.n + col + $eu] = sum[$e]; }
#end
#endif
}
#else
fn store(row: u32, col: u32, base: u32, sum: vec4<f32>) {
#if VEC_C
  if (col >= p.n) { return; }
  var x = p.alpha * sum;
  let at = (base + row * p.ldc + p.c_col + col) >> 2u;
#if HAS_BIAS
  x += bias4(p.c_col + col);
#endif
#if HAS_RESIDUAL
#if RESIDUAL_AHEAD
  x += ahead_of_store;
#else
  x += vec4<f32>(residual[at]);
#endif
#endif
#if ACCUMULATE
  x += vec4<f32>(c[at]);
#endif
  c[at] = C_T(x);
#else
#unroll e 4
  if (col + $eu < p.n) {
    let at = base + row * p.ldc + p.c_col + col + $eu;
    var x = p.alpha * sum[$e];
#if HAS_BIAS
    x += bias[p.c_col + col + $eu];
#endif
#if HAS_RESIDUAL
    x += f32(residual[at]);
#endif
#if ACCUMULATE
    x += f32(c[at]);
#endif
    c[at] = C_T(x);
  }
#end
#endif
}
#endif
