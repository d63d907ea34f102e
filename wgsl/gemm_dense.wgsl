// Part of gemm.wgsl and gemm_direct.wgsl: the operand $x of f32, f16 or bf16, in units of 4 elements of a row. What it
// gives is what a weight format gives (nf4.wgsl).
#include "dense.wgsl" x=$x binding=$binding kind=$kind vec=$vec
alias Ready_$x = vec4<f32>;

// With $vec `at` is a multiple of 4 and all four are inside the row.
fn fetch_$x(at: u32, inside: u32) -> vec4<f32> {
#if $vec
  return read_$x(at >> 2u);
#else
  var r = vec4<f32>(0.0);
#unroll e 4
  if ($eu < inside) { r[$e] = read_$x(at + $eu); }
#end
  return r;
#endif
}

fn ready_$x(unit: vec4<f32>) -> vec4<f32> { return unit; }
fn four_$x(unit: vec4<f32>, first: u32) -> vec4<f32> { return unit; }
fn prepare_$x(lid: u32) {}
