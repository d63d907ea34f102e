// Log-odds of log-probabilities: y = z - log(1 - exp(z)), z = min(x, -2^-20); backward: y = dy / (1 - exp(z)), 0 where
// x is larger than z.
//   x, dy, y [n]: f32 or f16, or vec4 of them; n counts such elements.
// Dispatch: ceil(n / 256) workgroups (folded), one element per invocation.
struct Params { n: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<X_T>;
#if BACKWARD
@group(0) @binding(2) var<storage, read> dy: array<DY_T>;
#endif
@group(0) @binding(3) var<storage, read_write> y: array<X_T>;

// 1 - exp(z) for z < 0; near 0 by its series, whose first omitted term is 3e-9 of it at -0.5.
fn one_minus_exp(z: C_T) -> C_T {
  var series = C_T(1.0);
  for (var k = 9.0; k > 1.5; k -= 1.0) { series = 1.0 + z / k * series; }
  return select(1.0 - exp(z), -z * series, z > C_T(-0.5));
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let i = (wg.x + wg.y * nwg.x) * 256u + lid;
  if (i >= p.n) { return; }
  let given = C_T(x[i]);
  let largest = C_T(-9.5367431640625e-7);
  let z = select(given, largest, given > largest);
  let rest = one_minus_exp(z);
#if BACKWARD
  y[i] = X_T(select(C_T(dy[i]) / rest, C_T(0.0), given > largest));
#else
  y[i] = X_T(z - log(rest));
#endif
}
