// Block-wise NF4: absmax of each block, codes[i] = number of thresholds below x[i] * (1 / absmax) (a tie takes the
// lower code), element 2j in the high nibble of byte j. Equal to bitsandbytes, value for value.
//   x [n] f32, or f16 / bf16 as pairs in u32 (KIND 0, 1, 2); X_T: vec4<f32> or vec4<u32> (VEC: n is a multiple of 8);
//   packed [ceil(n / 8)] u32; absmax [blocks] f32. The last block may be short.
// An invocation computes WORDS words of 8 codes; BLOCK / (8 WORDS) invocations share a block, through workgroup memory.
// Dispatch: ceil(n / (2048 WORDS)) workgroups (folded).
// Source: Dettmers et al., QLoRA (2023), section 3.
struct Params { n: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(2) var<storage, read_write> packed: array<u32>;
@group(0) @binding(3) var<storage, read_write> absmax: array<f32>;

const SHARE = BLOCK / (8u * WORDS);  // invocations of a block
var<workgroup> peaks: array<f32, 256>;

struct Eight { a: vec4<f32>, b: vec4<f32> }

#if VEC
@group(0) @binding(1) var<storage, read> x: array<X_T>;
fn load(word: u32) -> Eight {
  if (word * 8u >= p.n) { return Eight(vec4(0.0), vec4(0.0)); }
#if KIND == 0
  return Eight(x[word * 2u], x[word * 2u + 1u]);
#endif
#if KIND == 1
  let w = x[word];
  return Eight(vec4(unpack2x16float(w.x), unpack2x16float(w.y)), vec4(unpack2x16float(w.z), unpack2x16float(w.w)));
#endif
#if KIND == 2
  let w = x[word];
  let low = bitcast<vec4<f32>>(w << vec4(16u));
  let high = bitcast<vec4<f32>>(w & vec4(0xffff0000u));
  return Eight(vec4(low.x, high.x, low.y, high.y), vec4(low.z, high.z, low.w, high.w));
#endif
}
#else
#include "common.inc.wgsl" dense x=x binding=1 kind=KIND vec=VEC
fn one(at: u32) -> f32 {
  if (at >= p.n) { return 0.0; }
  return read_x(at);
}

fn load(word: u32) -> Eight {
  let i = word * 8u;
  return Eight(vec4(one(i), one(i + 1u), one(i + 2u), one(i + 3u)), vec4(one(i + 4u), one(i + 5u), one(i + 6u), one(i + 7u)));
}
#endif

#include "quantize.inc.wgsl" reciprocal

fn codes(v: vec4<f32>) -> vec4<u32> {
  // Bisection over the float32 midpoints of neighboring levels: four comparisons per number.
  let upper = v > vec4(THRESHOLD_7);
  let t1 = select(vec4(THRESHOLD_3), vec4(THRESHOLD_11), upper);
  let second = v > t1;
  let t2 = select(
    select(vec4(THRESHOLD_1), vec4(THRESHOLD_5), second), select(vec4(THRESHOLD_9), vec4(THRESHOLD_13), second), upper);
  let third = v > t2;
  let low = select(
    select(vec4(THRESHOLD_0), vec4(THRESHOLD_2), third), select(vec4(THRESHOLD_4), vec4(THRESHOLD_6), third), second);
  let high = select(
    select(vec4(THRESHOLD_8), vec4(THRESHOLD_10), third), select(vec4(THRESHOLD_12), vec4(THRESHOLD_14), third), second);
  let fourth = v > select(low, high, upper);
  return select(vec4(0u), vec4(8u), upper) + select(vec4(0u), vec4(4u), second)
    + select(vec4(0u), vec4(2u), third) + select(vec4(0u), vec4(1u), fourth);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let word = ((wg.x + wg.y * nwg.x) * 256u + lid) * WORDS;
  var peak = 0.0;
#unroll i WORDS
  let v$i = load(word + $iu);
  let top$i = max(abs(v$i.a), abs(v$i.b));
  peak = max(peak, max(max(top$i.x, top$i.y), max(top$i.z, top$i.w)));
#end
  peaks[lid] = peak;
  workgroupBarrier();
  // Reduce within each block's run of invocations.
  for (var width = SHARE / 2u; width > 0u; width /= 2u) {
    if (lid % SHARE < width) { peaks[lid] = max(peaks[lid], peaks[lid + width]); }
    workgroupBarrier();
  }
  peak = peaks[lid / SHARE * SHARE];
  if (word * 8u >= p.n) { return; }
  if (lid % SHARE == 0u) { absmax[word * 8u / BLOCK] = peak; }
  let scale = reciprocal(peak);
#unroll i WORDS
  if ((word + $iu) * 8u < p.n) {
    let a$i = codes(v$i.a * scale) << vec4(4u, 0u, 12u, 8u);
    let b$i = codes(v$i.b * scale) << vec4(20u, 16u, 28u, 24u);
    packed[word + $iu] = a$i.x | a$i.y | a$i.z | a$i.w | b$i.x | b$i.y | b$i.z | b$i.w;
  }
#end
}
