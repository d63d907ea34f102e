// Double quantization of the absmax of NF4 blocks: with d = absmax - offset (offset: the mean),
//   nested_absmax[j] = max |d| over block j of 256; codes[i] = number of thresholds below d[i] * (1 /
//   nested_absmax[j]). absmax [blocks] f32; total [1] f32: their sum; thresholds [255] f32: midpoints of the 8-bit map;
//   offset [1] f32; codes [ceil(blocks / 4)] u32: four bytes each; nested_absmax [ceil(blocks / 256)] f32.
// Dispatch: ceil(blocks / 256) workgroups of 64 (folded), one block of 256 each, 4 numbers per invocation.
// Sources: Dettmers et al., QLoRA (2023), section 3; Dettmers et al., 8-bit Optimizers (2022), section 2.2.
struct Params { blocks: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> absmax: array<f32>;
@group(0) @binding(2) var<storage, read> total: array<f32>;
@group(0) @binding(3) var<storage, read> thresholds: array<f32>;
@group(0) @binding(4) var<storage, read_write> offset: array<f32>;
@group(0) @binding(5) var<storage, read_write> codes: array<u32>;
@group(0) @binding(6) var<storage, read_write> nested_absmax: array<f32>;

var<workgroup> peaks: array<f32, 64>;

#include "quantize.inc.wgsl" reciprocal

// Number of thresholds below v.
fn code(v: f32) -> u32 {
  var low = 0u;
  for (var step = 128u; step > 0u; step /= 2u) {
    if (v > thresholds[low + step - 1u]) { low += step; }
  }
  return low;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let block = wg.x + wg.y * nwg.x;
  let base = block * 256u + lid * 4u;
  let mean = total[0] / f32(p.blocks);
  if (block == 0u && lid == 0u) { offset[0] = mean; }
  var peak = 0.0;
#unroll i 4
  var d$i = 0.0;
  if (base + $iu < p.blocks) { d$i = absmax[base + $iu] - mean; }
  peak = max(peak, abs(d$i));
#end
  peaks[lid] = peak;
  workgroupBarrier();
  for (var width = 32u; width > 0u; width /= 2u) {
    if (lid < width) { peaks[lid] = max(peaks[lid], peaks[lid + width]); }
    workgroupBarrier();
  }
  if (block * 256u >= p.blocks) { return; }
  if (lid == 0u) { nested_absmax[block] = peaks[0]; }
  if (base >= p.blocks) { return; }
  let scale = reciprocal(peaks[0]);
  codes[base / 4u] = code(d0 * scale) | (code(d1 * scale) << 8u) | (code(d2 * scale) << 16u) | (code(d3 * scale) << 24u);
}
