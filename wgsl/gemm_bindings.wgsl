// Part of the shaders of a product: the parameters, and every array but the two operands.
struct Params {
  m: u32, n: u32, k: u32, k_per_split: u32,
  ldc: u32, c_col: u32, rank: u32, block_shift: u32,
  nested_shift: u32, lda: u32, a_col: u32, zero: u32, alpha: f32,
  part_1: u32, part_2: u32, absmax_1: u32, absmax_2: u32, nested_1: u32, nested_2: u32,
  ld_u: u32, column_1: u32, column_2: u32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(3) var<storage, read_write> c: array<C_T>;
#if HAS_BIAS
@group(0) @binding(4) var<storage, read> bias: array<f32>;
#endif
#if HAS_RESIDUAL
#if RESIDUAL_AHEAD
// Only read: but where an array is bound for that alone NVIDIA's compiler moves its loads behind barriers, to their use.
@group(0) @binding(5) var<storage, read_write> residual: array<R_T>;
#else
@group(0) @binding(5) var<storage, read> residual: array<R_T>;
#endif
#endif
#if HAS_LOWRANK
@group(0) @binding(6) var<storage, read> u: array<U_T>;
@group(0) @binding(7) var<storage, read> v: array<V_T>;
// Which of the weights of a stack a column of C is of. u has the ranks of all of them side by side, rows of v those of
// their own; the bounds are multiples of 64 columns.
fn part_of(column: u32) -> u32 {
#if PARTS
  return u32(p.c_col + column >= p.column_1) + u32(p.c_col + column >= p.column_2);
#else
  return 0u;
#endif
}
#endif

#include "optimisation_barrier.wgsl"
fn first_element() -> u32 { return 0u; }
