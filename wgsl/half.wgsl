// A float16 by its bits, which WGSL's own conversions may take for 0 below 2^-14: scales of small weights are so small.
// There the exponent's bits are 0, and a float32 of the same mantissa is half of the value, plus 2^-15.
fn half_value(bits: u32) -> f32 {
  let size = bitcast<f32>(((bits & 0x7fffu) << 13u) + 0x38000000u);
  let value = size + min(size - 6.103515625e-05f, 0.0f);
  return bitcast<f32>(bitcast<u32>(value) | ((bits & 0x8000u) << 16u));
}

// Of two in a word.
fn half_of(word: u32, index: u32) -> f32 { return half_value(word >> (16u * index)); }
