// y[i] = keep(i) ? x[i] / (1 - p) : 0, keep(i): word i % 4 of Philox-4x32-10 with key seed and counter
// (i / 4, stream, 0, 0) is at least floor(p * 2^32).
//   x, y [n] X_T: f32 or f16 or vec4 of them; seed [2] u32; four consecutive numbers share one counter.
// Dispatch: ceil(n / 4 / 256) workgroups (folded), four numbers per invocation. `first` is i / 4 of the window's start.
// Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011).
struct Params { n: u32, first: u32, stream: u32, threshold: u32, keep: f32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<X_T>;
@group(0) @binding(2) var<storage, read> seed: array<u32>;
@group(0) @binding(3) var<storage, read_write> y: array<X_T>;

// High word of a 32 x 32 bit product, from 16-bit pieces: WGSL has no wide multiplication.
fn high(a: u32, b: u32) -> u32 {
  let a0 = a & 0xffffu; let a1 = a >> 16u;
  let b0 = b & 0xffffu; let b1 = b >> 16u;
  let middle = a1 * b0 + ((a0 * b0) >> 16u);
  let other = a0 * b1 + (middle & 0xffffu);
  return a1 * b1 + (middle >> 16u) + (other >> 16u);
}

fn philox(counter: u32) -> vec4<u32> {
  var c = vec4<u32>(counter, p.stream, 0u, 0u);
  var key = vec2<u32>(seed[0], seed[1]);
  for (var round = 0u; round < 10u; round++) {
    c = vec4<u32>(
      high(0xcd9e8d57u, c.z) ^ c.y ^ key.x, 0xcd9e8d57u * c.z,
      high(0xd2511f53u, c.x) ^ c.w ^ key.y, 0xd2511f53u * c.x);
    key += vec2<u32>(0x9e3779b9u, 0xbb67ae85u);
  }
  return c;
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let at = (wg.x + wg.y * nwg.x) * 256u + lid;
  if (at * 4u >= p.n) { return; }
  let words = philox(p.first + at);
#if VEC == 4
  let value = vec4<f32>(x[at]) / p.keep;
  y[at] = X_T(select(vec4(0.0), value, words >= vec4(p.threshold)));
#else
  for (var j = 0u; j < 4u; j++) {
    let i = at * 4u + j;
    if (i < p.n) { y[i] = X_T(select(0.0, f32(x[i]) / p.keep, words[j] >= p.threshold)); }
  }
#endif
}
