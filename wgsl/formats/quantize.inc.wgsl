// Parts of the quantizers.

#part nearest
// The quotient by m, rounded to nearest, from a guess that is off by a few and its remainder.
fn nearest(guess: u32, left: i32, m: i32) -> u32 {
  var quotient = guess;
  var rest = left;
  for (var step = 0u; step < 4u && rest < 0; step++) {
    quotient -= 1u;
    rest += m;
  }
  for (var step = 0u; step < 4u && rest >= m; step++) {
    quotient += 1u;
    rest -= m;
  }
  return select(quotient, quotient + 1u, 2 * rest > m);
}
#endpart

#part reciprocal
// Part of the shaders that quantize.
#include nearest
// 1 / a, rounded to nearest, which a GPU's division does not guarantee. With the 24-bit mantissa m of a, the mantissa
// of 1 / a is 2^47 / m. The remainder of a guess fits 32 bits, as 2^47 is 0 modulo 2^32. No tie is possible.
fn reciprocal(a: f32) -> f32 {
  let bits = bitcast<u32>(a);
  let exponent = bits >> 23u;
  if (exponent == 0u) { return 0.0; }  // zero or subnormal: the block counts as zeros
  let mantissa = (bits & 0x7fffffu) | 0x800000u;
  if (mantissa == 0x800000u || exponent >= 252u) { return 1.0 / a; }
  let guess = 1.0 / bitcast<f32>((bits & 0x7fffffu) | 0x3f800000u);  // in (1/2, 1)
  let quotient = (bitcast<u32>(guess) & 0x7fffffu) | 0x800000u;
  let found = nearest(quotient, bitcast<i32>(0u - mantissa * quotient), i32(mantissa));
  // A quotient of 2^24 carries into the exponent, as it should.
  return bitcast<f32>(((252u - exponent) << 23u) + found);
}
#endpart

#part exact
// Part of the shaders that round to a GGUF type: arithmetic with NumPy's bits on every GPU.
#include nearest
// A product that is neither fused with a following sum nor reordered with another product: NVIDIA's compiler turns (w
// l) l into w (l l). So every factor that is a product must come from here.
fn times(a: f32, b: f32) -> f32 { return bitcast<f32>(optimization_barrier(bitcast<u32>(a * b))); }
fn times4(a: vec4<f32>, b: vec4<f32>) -> vec4<f32> { return bitcast<vec4<f32>>(bitcast<vec4<u32>>(a * b) | vec4(p.zero)); }

// The sum, added from the first element to the last.
fn in_order(sum: f32, four: vec4<f32>) -> f32 { return (((sum + four.x) + four.y) + four.z) + four.w; }

// a / b, rounded to nearest, for normal numbers and a normal result. The quotient of the mantissas is m_a 2^s / m_b, s
// = 23 or 24; the remainder of a guess fits 32 bits, as in `reciprocal`. No tie is possible.
fn divide(a: f32, b: f32) -> f32 {
  let x = bitcast<u32>(a);
  let y = bitcast<u32>(b);
  let m_a = (x & 0x7fffffu) | 0x800000u;
  let m_b = (y & 0x7fffffu) | 0x800000u;
  let e_a = i32((x >> 23u) & 255u);
  let e_b = i32((y >> 23u) & 255u);
  let below = m_a < m_b;
  let exponent = e_a - e_b + 127 - select(0, 1, below);
  if (e_a == 0 || e_b == 0 || e_a == 255 || e_b == 255 || exponent < 1 || exponent > 254) { return a / b; }
  let guess = bitcast<f32>((x & 0x7fffffu) | 0x3f800000u) / bitcast<f32>((y & 0x7fffffu) | 0x3f800000u);
  var quotient = (bitcast<u32>(guess) & 0x7fffffu) | 0x800000u;
  if (below && guess >= 1.0) { quotient = 0xffffffu; }
  if (!below && guess < 1.0) { quotient = 0x800000u; }
  let found = nearest(quotient, bitcast<i32>((m_a << select(23u, 24u, below)) - m_b * quotient), i32(m_b));
  return bitcast<f32>(((x ^ y) & 0x80000000u) | ((u32(exponent - 1) << 23u) + found));
}

// The square root of a normal number, rounded to nearest: its mantissa is the root of m 2^23 or m 2^24.
fn root(a: f32) -> f32 {
  let bits = bitcast<u32>(a);
  let exponent = i32(bits >> 23u);
  if (exponent == 0 || exponent >= 255) { return sqrt(a); }
  let odd = (exponent & 1) == 1;  // so is the power of two of the integer mantissa, which is 150 less
  let shift = select(24, 23, odd);
  let value = ((bits & 0x7fffffu) | 0x800000u) << u32(shift);
  var found = (bitcast<u32>(sqrt(a)) & 0x7fffffu) | 0x800000u;
  var rest = bitcast<i32>(value - found * found);
  for (var step = 0u; step < 4u && rest < 0; step++) {
    found -= 1u;
    rest += 2 * i32(found) + 1;
  }
  for (var step = 0u; step < 4u && rest > 2 * i32(found); step++) {
    rest -= 2 * i32(found) + 1;
    found += 1u;
  }
  if (rest > i32(found)) { found += 1u; }
  return bitcast<f32>((u32((exponent - 150 - shift) / 2 + 149) << 23u) + found);
}

// The bits of the nearest float16.
fn half_bits(a: f32) -> u32 {
  let bits = bitcast<u32>(a);
  let size = bits & 0x7fffffffu;
  let sign = (bits >> 16u) & 0x8000u;
  if (size >= 0x47800000u) { return sign | select(0x7c00u, 0x7e00u, size > 0x7f800000u); }
  if (size < 0x38800000u) { return sign | u32(round(bitcast<f32>(size) * 16777216.0)); }
  return sign | (((size + 0xfffu + ((size >> 13u) & 1u)) >> 13u) - (112u << 10u));
}
#endpart
