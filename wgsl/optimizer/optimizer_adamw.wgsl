// AdamW on one flat buffer, in place on p, exp_avg, exp_avg_sq; nothing where state[2] (STATE_APPLY) is 0. With
// g = grad * state[3], lr = hyper[0], bias1 = state[5], bias2 = state[6]:
//   m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2;
//   w = w - lr weight_decay w (the first decay_elements only) - lr (m / bias1) / (sqrt(v / bias2) + eps)
//   p, grad, exp_avg, exp_avg_sq [n] C_T: f32, or vec4<f32> where the size is a multiple of 4; hyper [4], state [8]
//   f32. decay counts numbers, not elements of C_T.
// Dispatch: ceil(n / 512) workgroups (folded), 2 elements per invocation, 256 apart: 8 loads in flight.
// Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), algorithm 2.
struct Params { n: u32, decay: u32, beta1: f32, rest1: f32, beta2: f32, rest2: f32, eps: f32, weight_decay: f32 }
@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read_write> weight: array<C_T>;
@group(0) @binding(2) var<storage, read> grad: array<C_T>;
@group(0) @binding(3) var<storage, read_write> exp_avg: array<C_T>;
@group(0) @binding(4) var<storage, read_write> exp_avg_sq: array<C_T>;
@group(0) @binding(5) var<storage, read> hyper: array<f32>;
@group(0) @binding(6) var<storage, read> state: array<f32>;

// weight_decay for numbers before `decay`, else 0.
fn decay_of(at: u32) -> C_T {
#if VEC == 4
  let first = at * 4u;
  return select(vec4(0.0), vec4(p.weight_decay), vec4(first, first + 1u, first + 2u, first + 3u) < vec4(p.decay));
#else
  return select(0.0, p.weight_decay, at < p.decay);
#endif
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>, @builtin(local_invocation_index) lid: u32) {
  if (state[2] == 0.0) { return; }
  let base = (wg.x + wg.y * nwg.x) * 512u + lid;
  let factor = state[3];
  let lr = hyper[0];
  let bias1 = state[5];
  let bias2 = state[6];
#unroll i 2
  let at$i = min(base + $i * 256u, p.n - 1u);
  let w$i = weight[at$i];
  let g$i = grad[at$i] * factor;
  let m$i = exp_avg[at$i];
  let v$i = exp_avg_sq[at$i];
#end
#unroll i 2
  if (base + $i * 256u < p.n) {
    let m = p.beta1 * m$i + p.rest1 * g$i;
    let v = p.beta2 * v$i + p.rest2 * (g$i * g$i);
    let decayed = w$i - lr * decay_of(at$i) * w$i;
    weight[at$i] = decayed - lr * (m / bias1) / (sqrt(v / bias2) + p.eps);
    exp_avg[at$i] = m;
    exp_avg_sq[at$i] = v;
  }
#end
}
