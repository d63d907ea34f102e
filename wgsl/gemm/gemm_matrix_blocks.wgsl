// y = b, f16 or bf16 of whole blocks, as f16 in blocks of 16 x 16, in the order of quantize_decode.wgsl: blocks follow
// each other row by row, and in a block the left halves of all rows precede the right halves.
// Dispatch: ceil(n / 256) workgroups (folded), one of n eights per invocation.
enable f16;

struct Params { n: u32, columns: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(2) var<storage, read_write> y: array<vec4<u32>>;

#include "common.inc.wgsl" eight
#include "common.inc.wgsl" matrix_dense x=b binding=1 kind=B_KIND

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let to = (wg.x + wg.y * nwg.x) * 256u + lid;
  if (to >= p.n) { return; }
  let block = to / 32u;
  let row = block / (p.columns / 16u) * 16u + to % 16u;
  let column = block % (p.columns / 16u) * 16u + to / 16u % 2u * 8u;
  let unit = ready_b(fetch_b(row * p.columns + column, 8u));
  let low = vec4<f32>(four_b(unit, 0u));
  let high = vec4<f32>(four_b(unit, 4u));
  y[to] = vec4<u32>(pack2x16float(low.xy), pack2x16float(low.zw), pack2x16float(high.xy), pack2x16float(high.zw));
}
