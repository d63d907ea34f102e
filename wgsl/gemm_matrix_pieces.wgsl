// Part of gemm_matrix.wgsl and gemm_matrix_skinny.wgsl: what stands in workgroup memory for cooperative matrices, and float32
// as two pieces of f16.

#include "eight.wgsl"

// What f16 holds of x; the other piece is x minus that. Without the barrier f32(f16(x)) is taken for x (seen on NVIDIA), and
// nothing would be left out.
fn held(x: vec4<f32>) -> vec4<f32> {
  return vec4<f32>(unpack2x16float(optimisation_barrier(pack2x16float(x.xy))),
                   unpack2x16float(optimisation_barrier(pack2x16float(x.zw))));
}
