// SiLU and GELU, plain or gating another array (SwiGLU, GEGLU), forward and backward.
//   silu(x) = x s(x), s = sigmoid;  gelu(x) = x s(2 sqrt(2 / pi) (x + 0.044715 x^3)), the tanh form written with s,
//   which loses no digits for negative x.
//   forward:  y = act(x) [* up]
//   backward: y = dy [* up] act'(x);  dup = dy act(x);  AGAIN: again = act(x) * up, the forward's y
//   x (gate), up, dy, y (dgate), dup, again [n]: f32 or f16, or vec4 of them; n counts such elements.
//   JOINED: x has rows of gate and up side by side, `half` elements each, and in the backward y those of dgate and dup.
// Dispatch: ceil(n / (256 PER)) workgroups (folded), PER elements per invocation, 256 apart, all loaded first.
// Sources: Hendrycks and Gimpel, Gaussian Error Linear Units (2016); Shazeer, GLU Variants Improve Transformer (2020).
struct Params { n: u32, half: u32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> x: array<X_T>;
#if GATED
#if !JOINED
@group(0) @binding(2) var<storage, read> up: array<UP_T>;
#endif
#endif
#if BACKWARD
@group(0) @binding(3) var<storage, read> dy: array<DY_T>;
#endif
@group(0) @binding(4) var<storage, read_write> y: array<X_T>;
#if DUP
@group(0) @binding(5) var<storage, read_write> dup: array<UP_T>;
#endif
#if AGAIN
@group(0) @binding(6) var<storage, read_write> again: array<X_T>;
#endif

// exp of at most 87 stays finite in float32.
fn sigmoid(z: C_T) -> C_T { return 1.0 / (1.0 + exp(min(-z, C_T(87.0)))); }

struct Activation { value: C_T, slope: C_T }

fn activate(z: C_T) -> Activation {
#if GELU
  let twice = 1.5957691216057308;
  let s = sigmoid(twice * z * (1.0 + 0.044715 * z * z));
  return Activation(z * s, s + z * s * (1.0 - s) * (twice * (1.0 + 0.134145 * z * z)));
#else
  let s = sigmoid(z);
  return Activation(z * s, s * (1.0 + z * (1.0 - s)));
#endif
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  let base = (wg.x + wg.y * nwg.x) * 256u * PER + lid;
#unroll i PER
  let at$i = min(base + $i * 256u, p.n - 1u);
#if JOINED
  let gate$i = at$i + at$i / p.half * p.half;
  let x$i = C_T(x[gate$i]);
  let up$i = C_T(x[gate$i + p.half]);
#else
  let x$i = C_T(x[at$i]);
#if GATED
  let up$i = C_T(up[at$i]);
#endif
#endif
#if BACKWARD
  let dy$i = C_T(dy[at$i]);
#endif
#end
#unroll i PER
  if (base + $i * 256u < p.n) {
    let act = activate(x$i);
#if BACKWARD
    var grad = dy$i * act.slope;
#else
    var grad = act.value;
#endif
#if GATED
    grad *= up$i;
#endif
#if JOINED
#if BACKWARD
    y[gate$i] = X_T(grad);
    y[gate$i + p.half] = X_T(dy$i * act.value);
#else
    y[at$i] = X_T(grad);
#endif
#else
    y[at$i] = X_T(grad);
#endif
#if DUP
    dup[at$i] = UP_T(dy$i * act.value);
#endif
#if AGAIN
    again[at$i] = X_T(act.value * up$i);
#endif
  }
#end
}
