// tanh of $of ($T) to the last digits of float32: WGSL's own may be off by 1e-5, and may overflow for large arguments.
// Source: Cephes, tanhf (Moshier): a polynomial near 0, where 1 - exp(-2 |x|) has lost digits.
fn tanh_of_$of(x: $T) -> $T {
  let z = x * x;
  let e = exp(-2.0 * abs(x));
  let poly = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z;
  return select(sign(x) * ((1.0 - e) / (1.0 + e)), x + x * z * (poly - 3.33332819422e-1), abs(x) < $T(0.625));
}
