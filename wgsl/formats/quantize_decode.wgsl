// y[i] = element i of a weight of B_FORMAT, computed in float32 and rounded to f16 where y is.
//   b and its scales as in the format's file (nf4.inc.wgsl); y [n] Y_T: f32 or f16, or vec4 of it (VEC 4).
//   Scales are bound whole: `first` is the element of the weight at which b and y begin.
// Dispatch: ceil(n / VEC / 1024) workgroups (folded), 4 elements of Y_T an invocation, 256 apart: stores are contiguous.
struct Params {
  n: u32, first: u32, block_shift: u32, nested_shift: u32, zero: u32,
  part_1: u32, part_2: u32, absmax_1: u32, absmax_2: u32, nested_1: u32, nested_2: u32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(3) var<storage, read_write> y: array<Y_T>;

#include "common.inc.wgsl" optimisation_barrier
const THREADS: u32 = 256u;
alias Four = vec4<f32>;
fn first_element() -> u32 { return p.first; }
#include B_FORMAT

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  prepare_b(lid);
  let base = (wg.x + wg.y * nwg.x) * 1024u + lid;
#unroll i 4
  let at$i = min(base + $i * 256u, p.n - 1u);
  let unit$i = fetch_b(at$i * VEC / UNIT * UNIT, UNIT);
#end
#unroll i 4
  if (base + $i * 256u < p.n) {
    let element = at$i * VEC % UNIT;
    let four = four_b(ready_b(unit$i), element & ~3u);
#if VEC == 4
    y[at$i] = Y_T(four);
#else
    y[at$i] = Y_T(four[element & 3u]);
#endif
  }
#end
}
