// The scales of Q4_K and Q5_K, a vec4 for 256 elements: float16 d (low) and dmin; of each group of 32, 4 bits each, the low
// bits of its scale; the same of its minimum; 2 bits each, the high bits of the scales, then of the minima.
// An element is d scale code - dmin minimum. Both products are exact in float32: a fused multiply-add gives the same bits.
#include "half.wgsl"
@group(0) @binding(8) var<storage, read> scales: array<vec4<u32>>;

fn scale_and_least(words: vec4<u32>, group: u32) -> vec2<f32> {
  let low = (words.yz >> vec2<u32>(4u * group)) & vec2<u32>(15u);
  let high = (vec2<u32>(words.w << 4u, words.w >> 12u) >> vec2<u32>(2u * group)) & vec2<u32>(48u);
  return vec2<f32>(half_of(words.x, 0u), half_of(words.x, 1u)) * vec2<f32>(low | high);
}
#include "scaled_with_least.wgsl"
