// y[i] = element i of a weight of B_FORMAT, computed in float32, and rounded if y is f16.
//   b and its scales as in the format's file (nf4.inc.wgsl); y [n] Y_T: f32 or f16, or vec4 of it (VEC 4).
//   Scales are bound whole: `first` is the element of the weight at which b and y begin.
//   IN_BLOCKS: y is in blocks of 16 x 16, as gemm_matrix.wgsl reads them, from a weight with `columns`. In a block, the
//   left halves of all rows precede the right halves. Y_T is vec4<u32>, eight f16; n counts units.
// Dispatch: ceil(n / VEC / 1024) workgroups (folded), 4 elements of Y_T per invocation, 256 apart: stores are
// contiguous. IN_BLOCKS: ceil(n / 512) workgroups, two units per invocation.
struct Params {
  n: u32, first: u32, block_shift: u32, nested_shift: u32, zero: u32,
  part_1: u32, part_2: u32, absmax_1: u32, absmax_2: u32, nested_1: u32, nested_2: u32,
  columns: u32,
}
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(3) var<storage, read_write> y: array<Y_T>;

#include "common.inc.wgsl" optimization_barrier
const THREADS: u32 = 256u;
alias Four = vec4<f32>;
fn first_element() -> u32 { return p.first; }
#include B_FORMAT

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  prepare_b(lid);
#if IN_BLOCKS
  // Sixteen neighboring invocations take a unit of each of sixteen rows, the next sixteen the next units.
  let base = (wg.x + wg.y * nwg.x) * 512u + lid;
  let units = p.columns / UNIT;  // of a row
#unroll i 2
  let at$i = min(base + $iu * 256u, p.n - 1u);
  let row$i = at$i % 16u;
  let strip$i = at$i / 16u / units;
  let column$i = at$i / 16u % units * UNIT;
  let unit$i = fetch_b((strip$i * 16u + row$i) * p.columns + column$i, UNIT);
#end
#unroll i 2
  if (base + $iu * 256u < p.n) {
    let ready = ready_b(unit$i);
#unroll e EIGHTS
    {
      let low = four_b(ready, 8u * $eu);
      let high = four_b(ready, 8u * $eu + 4u);
      let column = column$i + 8u * $eu;
      let block = strip$i * (p.columns / 16u) + column / 16u;
      y[block * 32u + column / 8u % 2u * 16u + row$i] =
        vec4<u32>(pack2x16float(low.xy), pack2x16float(low.zw), pack2x16float(high.xy), pack2x16float(high.zw));
    }
#end
  }
#end
#else
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
#endif
}
