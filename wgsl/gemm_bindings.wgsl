// Part of gemm.wgsl and gemm_matrix.wgsl: the parameters, and every array but the two operands.
struct Params {
  m: u32, n: u32, k: u32, k_per_split: u32,
  ldc: u32, c_col: u32, rank: u32, block_size: u32,
  nested_block: u32, lda: u32, a_col: u32, zero: u32, alpha: f32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(3) var<storage, read_write> c: array<C_T>;
#if HAS_BIAS
@group(0) @binding(4) var<storage, read> bias: array<f32>;
#endif
#if HAS_RESIDUAL
@group(0) @binding(5) var<storage, read> residual: array<R_T>;
#endif
#if HAS_LOWRANK
@group(0) @binding(6) var<storage, read> u: array<f32>;
@group(0) @binding(7) var<storage, read> v: array<f32>;
#endif
#if B_KIND == 3
#if NESTED
@group(0) @binding(8) var<storage, read> absmax: array<u32>;
@group(0) @binding(9) var<storage, read> nested_absmax: array<f32>;
@group(0) @binding(10) var<storage, read> nested_code: array<f32>;
@group(0) @binding(11) var<storage, read> nested_offset: array<f32>;
#else
@group(0) @binding(8) var<storage, read> absmax: array<f32>;
#endif
#endif
