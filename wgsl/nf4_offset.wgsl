// The offset of double quantisation: the mean of absmax, as near to the exact mean as one float32 comes.
//   absmax [blocks] f32; offset [1] f32: overwritten. Dispatch: one workgroup.
// Differences from this mean become codes, so an error of its last place would show in all of them: sums carry what a
// float32 addition drops (TwoSum, Knuth, The Art of Computer Programming 2, 4.2.2), and the quotient is corrected once
// (a card's division may be off by 2.5 units in the last place).
struct Params { blocks: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> absmax: array<f32>;
@group(0) @binding(2) var<storage, read_write> offset: array<f32>;

var<workgroup> sums: array<vec2<f32>, 256>;

// (high, low) + (high, low)
fn two_sum(a: vec2<f32>, b: vec2<f32>) -> vec2<f32> {
  let high = a.x + b.x;
  let part = high - a.x;
  return vec2<f32>(high, ((a.x - (high - part)) + (b.x - part)) + (a.y + b.y));
}

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) lid: u32) {
  var sum = vec2<f32>(0.0);
  for (var i = lid; i < p.blocks; i += 256u) { sum = two_sum(sum, vec2<f32>(absmax[i], 0.0)); }
  sums[lid] = sum;
  workgroupBarrier();
  for (var width = 128u; width > 0u; width /= 2u) {
    if (lid < width) { sums[lid] = two_sum(sums[lid], sums[lid + width]); }
    workgroupBarrier();
  }
  if (lid == 0u) {
    let count = f32(p.blocks);
    let quotient = (sums[0].x + sums[0].y) / count;
    let rest = fma(-quotient, count, sums[0].x) + sums[0].y;
    offset[0] = quotient + rest / count;
  }
}
