// y = x for x bfloat16 (a float32 without its lower 16 bits), or float16 where the device lacks it.
//   x [n] bf16 or f16 (KIND), two in a u32 (four read at once: VEC4); y [n] f32 or f16 (Y_T: vec4 of it, or one).
// Dispatch: ceil(n / VEC / 1024) workgroups (folded), 4 elements of VEC numbers per invocation, 256 apart.
struct Params { n: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(2) var<storage, read_write> y: array<Y_T>;

#include "common.inc.wgsl" dense x=x binding=1 kind=KIND vec=VEC4

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let base = (wg.x + wg.y * nwg.x) * 1024u + lid;
#unroll i 4
  let at$i = min(base + $i * 256u, p.n - 1u);
  let x$i = read_x(at$i);
#end
#unroll i 4
  if (base + $i * 256u < p.n) { y[at$i] = Y_T(x$i); }
#end
}
