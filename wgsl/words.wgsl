// Part of the weight formats: UNIT codes (8, 16, 32) of which 4 bits each lie in words of 8, from the lowest on; and codes
// to floats.
//   each(word, bits)           the word for the first eight codes, and from so many bits on for each next eight
//   eight_of(words, first)     the word of the eight that code `first` is one of
//   word_of(words, first)      the same, code `first` lowest
//
// A float whose last bit is worth 2^-s has an integer of few bits that lies at bit s of a word in the right place: with the
// exponent set, and the power of 2 that this stands for taken off again, it is that integer, exactly. That is a logical
// operation and an addition for each; shifts and conversions take twice an addition's time or more (NVIDIA).
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

// The two lowest bytes of each, in turn, less an integer.
fn bytes(even: u32, odd: u32, less: f32) -> vec4<f32> {
  let bits = vec4<u32>(even, odd, even, odd) & vec4<u32>(0xffu, 0xffu, 0xff00u, 0xff00u);
  let floats = bitcast<vec4<f32>>(bits | vec4<u32>(0x4b000000u, 0x4b000000u, 0x47000000u, 0x47000000u));
  return floats - (vec4<f32>(8388608.0, 8388608.0, 32768.0, 32768.0) + vec4<f32>(less));
}
