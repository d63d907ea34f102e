// y[i] = level[code i] * absmax[i / block_size], with element 2j in the high nibble of byte j, float32 before the cast.
//   packed [ceil(n / 8)] u32 (8 codes each); absmax [blocks] f32; y [n] Y_T: f32 or f16, or vec4 of it (VEC 4).
//   ROUND: each product is rounded to float16 (1) or bfloat16 (2) first.
//   NESTED: absmax is bytes, four in a u32, and stands for code[byte] * nested_absmax[block / nested_size] + offset[0];
//   code [256] f32, nested_absmax f32, offset [1] f32.
//   block_size = 2^block_shift, nested_size = 2^nested_shift. absmax is bound whole: first is the window's first element.
// Dispatch: ceil(n / VEC / 1024) workgroups (folded), 4 elements of Y_T an invocation, 256 apart: stores are contiguous.
// Source: Dettmers et al., QLoRA (2023), section 3.
struct Params { n: u32, first: u32, block_shift: u32, nested_shift: u32, zero: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> packed: array<u32>;
#if NESTED
@group(0) @binding(2) var<storage, read> absmax: array<u32>;
@group(0) @binding(3) var<storage, read> nested_absmax: array<f32>;
@group(0) @binding(4) var<storage, read> code: array<f32>;
@group(0) @binding(5) var<storage, read> offset: array<f32>;
#else
@group(0) @binding(2) var<storage, read> absmax: array<f32>;
#endif
@group(0) @binding(6) var<storage, read_write> y: array<Y_T>;

const LEVELS = array<f32, 16>(
  -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
  -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
  0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
  0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0);
var<workgroup> level: array<f32, 16>;  // sixteen banks: no two codes meet
#if NESTED
var<workgroup> outer: array<f32, 256>;  // code
#endif

#include "nf4_rounding.wgsl"

fn scale_of(block: u32) -> f32 {
#if NESTED
  let byte = (absmax[block / 4u] >> (8u * (block % 4u))) & 255u;
  // Through integers, with a zero that the compiler does not know: bitsandbytes rounds the product, so this must not
  // become a fused multiply-add (drivers make one where they can, and WGSL has no word against it).
  return bitcast<f32>(bitcast<u32>(outer[byte] * nested_absmax[block >> p.nested_shift]) | p.zero) + offset[0];
#else
  return absmax[block];
#endif
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  if (lid < 16u) {
    var all = LEVELS;
    level[lid] = all[lid];
  }
#if NESTED
  outer[lid] = code[lid];
#endif
  workgroupBarrier();
  let base = (wg.x + wg.y * nwg.x) * 1024u + lid;
#unroll i 4
  let at$i = min(base + $i * 256u, p.n - 1u);
  let word$i = packed[at$i * VEC / 8u];
  let scale$i = scale_of((p.first + at$i * VEC) >> p.block_shift);
#end
#unroll i 4
  if (base + $i * 256u < p.n) {
#if VEC == 4
    let w = word$i >> (16u * (at$i & 1u));
    let four = vec4(level[(w >> 4u) & 15u], level[w & 15u], level[(w >> 12u) & 15u], level[(w >> 8u) & 15u]);
    y[at$i] = Y_T(rounded(scale$i * four));
#else
    y[at$i] = Y_T(rounded(vec4<f32>(scale$i * level[(word$i >> (4u * ((at$i & 7u) ^ 1u))) & 15u])).x);
#endif
  }
#end
}
