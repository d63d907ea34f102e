// Parts of the decoders of weight formats.

#part words
// Part of the weight formats: UNIT codes (8, 16, 32) of which 4 bits each lie in words of 8, from the lowest on; and
// codes to floats.
//   each(word, bits)           the word for the first eight codes, and from so many bits on for each next eight
//   eight_of(words, first)     the word of the eight that code `first` is one of
//   word_of(words, first)      the same, code `first` lowest
//
// A float whose last bit is worth 2^-s has an integer of few bits that lies at bit s of a word in the right place: with
// the exponent set, and the power of 2 that this stands for taken off again, it is that integer, exactly. That is a
// logical operation and an addition for each; shifts and conversions take twice an addition's time or more (NVIDIA).
#if UNIT == 8
alias Words = u32;
fn each(word: u32, bits: u32) -> Words { return word; }
fn eight_of(words: Words, first: u32) -> u32 { return words; }
#else
#if UNIT == 16
alias Words = vec2<u32>;
fn each(word: u32, bits: u32) -> Words { return vec2<u32>(word, word >> bits); }
#else
alias Words = vec4<u32>;
fn each(word: u32, bits: u32) -> Words { return vec4<u32>(word) >> (vec4<u32>(0u, 1u, 2u, 3u) * bits); }
#endif
fn eight_of(words: Words, first: u32) -> u32 { return words[first >> 3u]; }
#endif
fn word_of(words: Words, first: u32) -> u32 { return eight_of(words, first) >> (4u * (first & 7u)); }

// The four lowest nibbles, less an integer.
fn nibbles(word: u32, less: f32) -> vec4<f32> {
  let bits = vec4<u32>(word) & vec4<u32>(0xfu, 0xf0u, 0xf00u, 0xf000u);
  let floats = bitcast<vec4<f32>>(bits | vec4<u32>(0x4b000000u, 0x49000000u, 0x47000000u, 0x45000000u));
  return floats - (vec4<f32>(8388608.0, 524288.0, 32768.0, 2048.0) + vec4<f32>(less));
}

// The four lowest fields of 2 bits, less an integer.
fn twos(word: u32, less: f32) -> vec4<f32> {
  let bits = vec4<u32>(word) & vec4<u32>(3u, 12u, 48u, 192u);
  let floats = bitcast<vec4<f32>>(bits | vec4<u32>(0x4b000000u, 0x4a000000u, 0x49000000u, 0x48000000u));
  return floats - (vec4<f32>(8388608.0, 2097152.0, 524288.0, 131072.0) + vec4<f32>(less));
}

// The two lowest bytes of each, in turn, less an integer.
fn bytes(even: u32, odd: u32, less: f32) -> vec4<f32> {
  let bits = vec4<u32>(even, odd, even, odd) & vec4<u32>(0xffu, 0xffu, 0xff00u, 0xff00u);
  let floats = bitcast<vec4<f32>>(bits | vec4<u32>(0x4b000000u, 0x4b000000u, 0x47000000u, 0x47000000u));
  return floats - (vec4<f32>(8388608.0, 8388608.0, 32768.0, 32768.0) + vec4<f32>(less));
}
#endpart

#part half
// A float16 by its bits, which WGSL's own conversions may take for 0 below 2^-14: scales of small weights are so small.
// There the exponent's bits are 0, and a float32 of the same mantissa is half of the value, plus 2^-15.
fn half_value(bits: u32) -> f32 {
  let size = bitcast<f32>(((bits & 0x7fffu) << 13u) + 0x38000000u);
  let value = size + min(size - 6.103515625e-05f, 0.0f);
  return bitcast<f32>(bitcast<u32>(value) | ((bits & 0x8000u) << 16u));
}

// Of two in a word.
fn half_of(word: u32, index: u32) -> f32 { return half_value(word >> (16u * index)); }
#endpart

#part scaled
// Part of the weight formats whose units have one scale: elements of the unit from their codes; or, FACTORED, the
// codes, and the scale on the sum that is made of them (nf4.inc.wgsl).
fn by_scale(unit: Ready_b, codes: vec4<f32>) -> Four {
#if FACTORED
  return Four(codes);
#else
  return Four(unit.scale * codes);
#endif
}

#if FACTORED
fn scaled_b(unit: Ready_b, first: u32, sum: f32, x: f32) -> f32 { return unit.scale * sum; }
#endif
#endpart

#part k_scales
// The scales of Q4_K and Q5_K, a vec4 for 256 elements: float16 d (low) and dmin; of each group of 32, 4 bits each, the
// low bits of its scale; the same of its minimum; 2 bits each, the high bits of the scales, then of the minima.
// An element is d scale code - dmin minimum. Both products are exact in float32: a fused multiply-add gives the same
// bits.
#include half
@group(0) @binding(8) var<storage, read> scales: array<vec4<u32>>;

fn scale_and_least(words: vec4<u32>, group: u32) -> vec2<f32> {
  let low = (words.yz >> vec2<u32>(4u * group)) & vec2<u32>(15u);
  let high = (vec2<u32>(words.w << 4u, words.w >> 12u) >> vec2<u32>(2u * group)) & vec2<u32>(48u);
  return vec2<f32>(half_of(words.x, 0u), half_of(words.x, 1u)) * vec2<f32>(low | high);
}
#include scaled_with_least
#endpart

#part scaled_with_least
// Part of the weight formats whose units have a scale, and a minimum of which `least` is the negative: as
// formats.inc.wgsl (scaled).
fn by_scale_and_least(unit: Ready_b, codes: vec4<f32>) -> Four {
#if FACTORED
  return Four(codes);
#else
  return Four(unit.scale * codes - vec4<f32>(unit.least));
#endif
}

#if FACTORED
fn scaled_b(unit: Ready_b, first: u32, sum: f32, x: f32) -> f32 { return unit.scale * sum - unit.least * x; }
#endif
#endpart

#part fifth
// Part of the weight formats with codes of 5 bits: the fifth of each code, 32 in a u32 from the lowest on.
@group(0) @binding(9) var<storage, read> fifth: array<u32>;

// Eight codes as bytes, those of elements 0, 2, 4, 6 and of 1, 3, 5, 7: from their nibbles, and their fifth bits in the
// lowest byte of `high`. Bits 2j (2j + 1) of it go to bits 8j + 4 by a product: bits 6j apart, what meets elsewhere
// carries into none of these.
fn even_codes(nibbles: Words, high: Words) -> Words {
  return (nibbles & Words(0x0f0f0f0fu)) | (((high & Words(0x55u)) * Words(0x410410u)) & Words(0x10101010u));
}
fn odd_codes(nibbles: Words, high: Words) -> Words {
  return ((nibbles >> Words(4u)) & Words(0x0f0f0f0fu)) | (((high & Words(0xaau)) * Words(0x208208u)) & Words(0x10101010u));
}
#endpart

#part groups
// Part of the weight formats of which a unit can have two scales, one for each 16 elements: GROUPS is 2 then, else 1.
#if GROUPS == 2
alias Scale = vec2<f32>;
alias Bits = vec2<u32>;
fn scale_at(scale: Scale, element: u32) -> f32 { return scale[element >> 4u]; }
fn fields(word: u32, bits: u32) -> Bits { return vec2<u32>(word, word >> bits); }  // the lowest of each
#else
alias Scale = f32;
alias Bits = u32;
fn scale_at(scale: Scale, element: u32) -> f32 { return scale; }
fn fields(word: u32, bits: u32) -> Bits { return word; }
#endif
#endpart

#part scaled_groups
// With `groups`, as `scaled`.
fn by_scale_at(unit: Ready_b, first: u32, codes: vec4<f32>) -> Four {
#if FACTORED
  return Four(codes);
#else
  return Four(scale_at(unit.scale, first) * codes);
#endif
}

#if FACTORED
fn scaled_b(unit: Ready_b, first: u32, sum: f32, x: f32) -> f32 { return scale_at(unit.scale, first) * sum; }
#endif
#endpart
