// A short causal convolution of each channel: y = silu(z), or z without SILU, z[t] = sum over j of x[t - j]
// weight[WIDTH - 1 - j].
//
// x [batch, given, channels] X_T, of which the last `tokens` are those of y; weight [channels, WIDTH] f32; doc_start
// [batch, tokens] i32; cache_len [1]; y [batch, tokens, channels] X_T: overwritten.
// `backward`: dy [batch, tokens, channels] DY_T; y has the shape of x and is overwritten with its gradient. `dweight`:
// y f32 [runs, channels, WIDTH] is overwritten with sums of weight's gradient over RUN tokens each.
// Dispatch: a workgroup per 256 elements of y; dweight: per 256 pairs of run and channel.
struct Params { batch: u32, tokens: u32, given: u32, channels: u32, runs: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<X_T>;
@group(0) @binding(2) var<storage, read> weight: array<f32>;
@group(0) @binding(3) var<storage, read> doc_start: array<i32>;
@group(0) @binding(4) var<storage, read> cache_len: array<i32>;
#if BACKWARD
@group(0) @binding(5) var<storage, read> dy: array<DY_T>;
#endif
@group(0) @binding(6) var<storage, read_write> y: array<Y_T>;

// How far token t's document reaches back, limited to the elements of x; negative if it begins after t.
fn reach(b: u32, t: u32) -> i32 {
  return min(i32(t) + cache_len[0] - doc_start[b * p.tokens + t], i32(t + p.given - p.tokens));
}
// The element of x at tap j of a token.
fn tap(b: u32, t: u32, c: u32, j: u32) -> f32 {
  return f32(x[(b * p.given + t + p.given - p.tokens - j) * p.channels + c]);
}
fn sum_of_taps(b: u32, t: u32, c: u32) -> f32 {
  let seen = reach(b, t);
  var z = 0.0;
#unroll j WIDTH
  if ($j <= seen) { z += tap(b, t, c, $ju) * weight[c * WIDTH + WIDTH - 1u - $ju]; }
#end
  return z;
}
fn sigmoid(z: f32) -> f32 { return 1.0 / (1.0 + exp(min(-z, 87.0))); }

#if BACKWARD
// The gradient of a token's z.
fn sum_gradient(b: u32, t: u32, c: u32) -> f32 {
#if SILU
  let z = sum_of_taps(b, t, c);
#endif
  let grad = f32(dy[(b * p.tokens + t) * p.channels + c]);
#if SILU
  let s = sigmoid(z);
  return grad * s * (1.0 + z * (1.0 - s));
#else
  return grad;
#endif
}

@compute @workgroup_size(256)
fn backward(@builtin(global_invocation_id) gid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>) {
  let number = gid.x + gid.y * nwg.x * 256u;
  if (number >= p.batch * p.given * p.channels) { return; }
  let c = number % p.channels;
  let e = number / p.channels % p.given + p.tokens;  // of token e - given
  let b = number / p.channels / p.given;
  var grad = 0.0;
#unroll j WIDTH
  if (e + $ju >= p.given && e + $ju - p.given < p.tokens) {
    let t = e + $ju - p.given;
    if ($j <= reach(b, t)) { grad += sum_gradient(b, t, c) * weight[c * WIDTH + WIDTH - 1u - $ju]; }
  }
#end
  y[number] = Y_T(grad);
}

@compute @workgroup_size(256)
fn dweight(@builtin(global_invocation_id) gid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>) {
  let number = gid.x + gid.y * nwg.x * 256u;
  if (number >= p.runs * p.channels) { return; }
  let c = number % p.channels;
  let first = number / p.channels * RUN;
#unroll j WIDTH
  var sum$j = 0.0;
#end
  for (var n = first; n < min(first + RUN, p.batch * p.tokens); n++) {
    let b = n / p.tokens;
    let t = n % p.tokens;
    let grad = sum_gradient(b, t, c);
    let seen = reach(b, t);
#unroll j WIDTH
    if ($j <= seen) { sum$j += grad * tap(b, t, c, $ju); }
#end
  }
#unroll j WIDTH
  y[number * WIDTH + WIDTH - 1u - $ju] = Y_T(sum$j);
#end
}
#else
@compute @workgroup_size(256)
fn forward(@builtin(global_invocation_id) gid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>) {
  let number = gid.x + gid.y * nwg.x * 256u;
  if (number >= p.batch * p.tokens * p.channels) { return; }
  let t = number / p.channels % p.tokens;
  let z = sum_of_taps(number / p.channels / p.tokens, t, number % p.channels);
#if SILU
  y[number] = Y_T(z * sigmoid(z));
#else
  y[number] = Y_T(z);
#endif
}
#endif
