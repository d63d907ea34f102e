// A float16 by its bits, which WGSL's own conversions may take for 0 below 2^-14: scales of small weights are so small.
fn half_value(bits: u32) -> f32 {
  let size = select(f32(bits & 1023u) * 5.9604644775390625e-08f, bitcast<f32>(((bits & 0x7fffu) << 13u) + 0x38000000u),
                    (bits & 0x7c00u) != 0u);
  return select(size, -size, (bits & 0x8000u) != 0u);
}

// Of two in a word.
fn half_of(word: u32, index: u32) -> f32 { return half_value((word >> (16u * index)) & 0xffffu); }
