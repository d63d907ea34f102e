// Parts of the quantisers.

#part reciprocal
// Part of the shaders that quantise.
// 1 / a rounded to nearest, which a GPU's division does not promise. With the mantissa m (24 bits) of a, the mantissa of
// 1 / a is 2^47 / m; the remainder of a guess fits 32 bits, as 2^47 is 0 modulo 2^32. No tie is possible.
fn reciprocal(a: f32) -> f32 {
  let bits = bitcast<u32>(a);
  let exponent = bits >> 23u;
  if (exponent == 0u) { return 0.0; }  // zero or subnormal: the block is as good as zero
  let mantissa = (bits & 0x7fffffu) | 0x800000u;
  if (mantissa == 0x800000u || exponent >= 252u) { return 1.0 / a; }
  let guess = 1.0 / bitcast<f32>((bits & 0x7fffffu) | 0x3f800000u);  // in (1/2, 1)
  var quotient = (bitcast<u32>(guess) & 0x7fffffu) | 0x800000u;
  var rest = bitcast<i32>(0u - mantissa * quotient);
  let m = i32(mantissa);
  for (var step = 0u; step < 4u && rest < 0; step++) {
    quotient -= 1u;
    rest += m;
  }
  for (var step = 0u; step < 4u && rest >= m; step++) {
    quotient += 1u;
    rest -= m;
  }
  if (2 * rest > m) { quotient += 1u; }
  // A quotient of 2^24 carries into the exponent, as it should.
  return bitcast<f32>(((252u - exponent) << 23u) + quotient);
}
#endpart
