// Parts of the decoders of weight formats.

#part words
// Part of the weight formats: UNIT codes (8, 16, 32), of which 4 bits each are packed 8 to a word, lowest first; and
// conversion of codes to floats.
//   each(word, bits)           the word for the first eight codes, shifted by so many bits for each next eight
//   eight_of(words, first)     the word of the eight codes that include code `first`
//   word_of(words, first)      the same, shifted so that code `first` is lowest
//
// A small integer at bit s of a word is in the mantissa of a float whose last bit is worth 2^-s. With that exponent
// set, and its power of 2 subtracted, the float equals the integer exactly. That takes one logical operation and one
// addition; shifts and conversions take at least twice an addition's time (NVIDIA).
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

// The four bytes, less an integer.
fn four_bytes(word: u32, less: f32) -> vec4<f32> {
  let above = word >> 16u;
  let bits = vec4<u32>(word, word, above, above) & vec4<u32>(0xffu, 0xff00u, 0xffu, 0xff00u);
  let floats = bitcast<vec4<f32>>(bits | vec4<u32>(0x4b000000u, 0x47000000u, 0x4b000000u, 0x47000000u));
  return floats - (vec4<f32>(8388608.0, 32768.0, 8388608.0, 32768.0) + vec4<f32>(less));
}

// The two lowest bytes of each, in turn, less an integer.
fn bytes(even: u32, odd: u32, less: f32) -> vec4<f32> {
  let bits = vec4<u32>(even, odd, even, odd) & vec4<u32>(0xffu, 0xffu, 0xff00u, 0xff00u);
  let floats = bitcast<vec4<f32>>(bits | vec4<u32>(0x4b000000u, 0x4b000000u, 0x47000000u, 0x47000000u));
  return floats - (vec4<f32>(8388608.0, 8388608.0, 32768.0, 32768.0) + vec4<f32>(less));
}
#endpart

#part half
// A float16 from its bits. WGSL's own conversions may flush values below 2^-14, as scales of small weights are, to 0.
// There the exponent bits are 0, and the float32 with the same mantissa is half of the value plus 2^-15.
fn half_value(bits: u32) -> f32 {
  let size = bitcast<f32>(((bits & 0x7fffu) << 13u) + 0x38000000u);
  let value = size + min(size - 6.103515625e-05f, 0.0f);
  return bitcast<f32>(bitcast<u32>(value) | ((bits & 0x8000u) << 16u));
}

// One of two float16 in a word.
fn half_of(word: u32, index: u32) -> f32 { return half_value(word >> (16u * index)); }
#endpart

#part scaled
// Part of the weight formats whose units have one scale: elements of the unit from their codes; with FACTORED, the
// codes themselves, and the scale is applied to their sum (nf4.inc.wgsl).
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
// The scales of Q4_K and Q5_K, a vec4 for 256 elements: float16 d (low) and dmin; for each group of 32, the low 4 bits
// of its scale; the low 4 bits of its minimum; 2 high bits of each scale, then of each minimum.
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
// Part of the weight formats whose units have a scale and a minimum (`least` is its negative): as the part scaled.
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
// Part of the weight formats with codes of 5 bits: the fifth bit of each code, 32 in a u32, lowest first.
@group(0) @binding(9) var<storage, read> fifth: array<u32>;

// Eight codes as bytes, those of elements 0, 2, 4, 6 and of 1, 3, 5, 7, from their nibbles and the fifth bits in the
// lowest byte of `high`. A multiplication moves bits 2j (or 2j + 1) of it to bits 8j + 4; other partial products do not
// carry into these.
fn even_codes(nibbles: Words, high: Words) -> Words {
  return (nibbles & Words(0x0f0f0f0fu)) | (((high & Words(0x55u)) * Words(0x410410u)) & Words(0x10101010u));
}
fn odd_codes(nibbles: Words, high: Words) -> Words {
  return ((nibbles >> Words(4u)) & Words(0x0f0f0f0fu)) | (((high & Words(0xaau)) * Words(0x208208u)) & Words(0x10101010u));
}
#endpart

#part groups
// Part of the weight formats whose units can have two scales, one for each 16 elements. Then GROUPS is 2, else 1.
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
// As the part scaled, with the part groups.
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
