// Round to Q4_0, Q5_0 or Q8_0: blocks of 32 codes of BITS and a float16 scale, as ggml's quantize_row_*_ref.
//   x [n] f32; codes, scales and high (the fifth bits, BITS 5) as in device/formats/q4_q5.py and q8_0.py, in u32.
// Dispatch: ceil(n / 64 / 64) workgroups (folded); an invocation computes two blocks, whose scales share a word.
// Source: github.com/ggml-org/llama.cpp, ggml-quants.c.
struct Params { n: u32, zero: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> codes: array<u32>;
@group(0) @binding(3) var<storage, read_write> scales: array<u32>;
#if BITS == 5
@group(0) @binding(4) var<storage, read_write> high: array<u32>;
#endif

#include "common.inc.wgsl" optimization_barrier
#include "quantize.inc.wgsl" exact

fn code(value: f32, inverse: f32) -> u32 {
#if BITS == 8
  let scaled = times(value, inverse);
  let whole = trunc(scaled);
  return u32(i32(whole + trunc(2.0 * (scaled - whole)))) & 255u;
#else
  let middle = f32(1u << (BITS - 1u));
  return u32(clamp(trunc(times(value, inverse) + (middle + 0.5)), 0.0, 2.0 * middle - 1.0));
#endif
}

fn made(block: u32) -> u32 {
  let first = block * 32u;
  if (first >= p.n) { return 0u; }
  var largest = 0.0;
  for (var i = 0u; i < 32u; i++) {
    let value = x[first + i];
    if (abs(value) > abs(largest)) { largest = value; }
  }
#if BITS == 8
  let scale = divide(abs(largest), 127.0);
#else
  let scale = largest * -(1.0 / f32(1u << (BITS - 1u)));
#endif
  var inverse = 0.0;
  if (scale != 0.0) { inverse = divide(1.0, scale); }
#if BITS == 8
  for (var word = 0u; word < 8u; word++) {
    var four = 0u;
    for (var i = 0u; i < 4u; i++) { four |= code(x[first + word * 4u + i], inverse) << (8u * i); }
    codes[block * 8u + word] = four;
  }
#else
  var fifth = 0u;
  for (var word = 0u; word < 4u; word++) {
    var eight = 0u;
    for (var i = 0u; i < 8u; i++) {
      let one = code(x[first + word * 8u + i], inverse);
      eight |= (one & 15u) << (4u * i);
      fifth |= (one >> 4u) << (word * 8u + i);
    }
    codes[block * 4u + word] = eight;
  }
#if BITS == 5
  high[block] = fifth;
#endif
#endif
  return half_bits(scale);
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let pair = (wg.x + wg.y * nwg.x) * 64u + lid;
  if (pair * 64u >= p.n) { return; }
  scales[pair] = made(pair * 2u) | (made(pair * 2u + 1u) << 16u);
}
