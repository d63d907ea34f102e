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

// The product scale * level, rounded to nearest even in float16 (ROUND 1) or bfloat16 (2) by its bits: what WGSL itself
// rounds to 16 bits may go either way.
fn rounded(v: vec4<f32>) -> vec4<f32> {
#if ROUND == 0
  return v;
#else
  let u = bitcast<vec4<u32>>(v);
#if ROUND == 2
  return bitcast<vec4<f32>>((u + vec4<u32>(0x7fffu) + ((u >> vec4<u32>(16u)) & vec4<u32>(1u))) & vec4<u32>(0xffff0000u));
#else
  let size = u & vec4<u32>(0x7fffffffu);
  let exponent = size >> vec4<u32>(23u);
  // Ten bits of the mantissa stay; below 2^-14 one less for each power of 2, down to none at 2^-24.
  let drop = min(vec4<u32>(13u) + (max(exponent, vec4<u32>(113u)) - exponent), vec4<u32>(23u));
  let below_half = (vec4<u32>(1u) << (drop - vec4<u32>(1u))) - vec4<u32>(1u);
  let near = ((size + below_half + ((size >> drop) & vec4<u32>(1u))) >> drop) << drop;
  let least = select(vec4<u32>(0u), vec4<u32>(0x33800000u), size > vec4<u32>(0x33000000u));  // 2^-24 from above 2^-25 on
  let result = select(near, least, size < vec4<u32>(0x33800000u));
  return bitcast<vec4<f32>>(result | (u & vec4<u32>(0x80000000u)));
#endif
#endif
}

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
