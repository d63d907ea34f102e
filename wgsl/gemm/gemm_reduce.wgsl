// Second pass of a GEMM split over K: C = alpha * sum over splits + bias + residual (+ C), in a fixed order.
//   partial [splits, M, N] f32; c, bias, residual as in gemm.wgsl.
// Dispatch: ceil(M N / 256) workgroups (folded), one element per invocation (4 where VEC_C).
struct Params { m: u32, n: u32, splits: u32, ldc: u32, c_col: u32, alpha: f32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> partial: array<P_T>;
@group(0) @binding(2) var<storage, read_write> c: array<C_T>;
#if HAS_BIAS
@group(0) @binding(3) var<storage, read> bias: array<f32>;
#endif
#if HAS_RESIDUAL
@group(0) @binding(4) var<storage, read> residual: array<R_T>;
#endif

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let i = (wg.x + wg.y * nwg.x) * 256u + lid;
  let per_split = p.m * p.n / WIDTH;
  if (i >= per_split) { return; }
  var x = partial[i];
  for (var s = 1u; s < p.splits; s++) { x += partial[s * per_split + i]; }
  x *= p.alpha;
  let row = i * WIDTH / p.n;
  let col = i * WIDTH - row * p.n;
  let at = (row * p.ldc + p.c_col + col) / WIDTH;
#if HAS_BIAS
#if VEC_C
  let first = p.c_col + col;
  x += vec4<f32>(bias[first], bias[first + 1u], bias[first + 2u], bias[first + 3u]);
#else
  x += bias[p.c_col + col];
#endif
#endif
#if HAS_RESIDUAL
  x += P_T(residual[at]);
#endif
#if ACCUMULATE
  x += P_T(c[at]);
#endif
  c[at] = C_T(x);
}
